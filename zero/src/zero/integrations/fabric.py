"""Lightning Fabric trains with the engine.

    fabric = Fabric(devices=8, strategy=ZeroStrategy(zero.Config(stage=3)))
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)

The loop stays as it is: `fabric.backward`, `optimizer.step`, `fabric.clip_gradients`, `fabric.save`. The name
"zero" works too, once this module is imported, for `zero.Config()`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.accelerators import ACCELERATOR_REGISTRY, Accelerator
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.optim import Optimizer

import accelz
from zero.config.training import Config
from zero.deferred.deferred_init import init
from zero.engine import Engine
from zero.errors import CheckpointError, ConfigError, UsageError
from zero.optimizer.joint import parameters_of
from zero.setup.initialization import initialize
from zero.sharding.guard import ShardedParameter

PRIVATE_NAMES = (
    "lightning.fabric.strategies.strategy._BackwardSyncControl",
    "lightning.fabric.strategies.DDPStrategy()._backward_sync_control",
)
"""What this module uses of Fabric's private names; `()` stands for an object of the class."""

NAME = "zero"
DEVICE_NAME = "accelz"
PARTS = {"accelerator", "cluster_environment", "precision", "precision_plugin"}
"""What a strategy's constructor takes of Lightning."""
REST = "lightning"
"""The key under which a checkpoint has, as torch.save's bytes, what is neither model nor optimizer."""


class AccelzAccelerator(Accelerator):
    """Fabric's view of the device that accelz has chosen: `Fabric(accelerator="accelz")`.

    Only needed for a device that Fabric does not know by itself.
    """

    def setup_device(self, device: torch.device) -> None:
        """Refuse another device than accelz's, such as the CPU that Lightning's "auto" takes in place of one
        that it does not know. `join_job` binds the process. Raises UsageError."""
        chosen = accelz.current().device
        if device.type != chosen.type:
            raise UsageError(
                f"the strategy runs on {device}, and accelz has chosen {chosen}: write "
                f"strategy=ZeroStrategy(), or lightning's SingleDeviceStrategy(device={chosen.type!r})"
            )

    def teardown(self) -> None:
        accelz.current().memory.trim()

    @staticmethod
    def parse_devices(devices: int | str) -> int:
        """The number of devices of a machine: itself, or "auto" or -1 for all."""
        if devices in ("auto", -1, "-1"):
            return accelz.current().device_count()
        if not str(devices).isdecimal():
            raise ConfigError(
                f"devices={devices!r}: give the number of devices, since each rank takes the one of its own "
                "number; the variable of the device's library says which are visible"
            )
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """Each rank's device, as far as it is known before the process is bound to it."""
        return [accelz.current().device] * devices

    @staticmethod
    def auto_device_count() -> int:
        return accelz.current().device_count()

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return DEVICE_NAME


class OnAccelz:
    """What Fabric's strategy and the Trainer's have in common; comes before Lightning's class.

    parts: `accelerator`, `cluster_environment`, and `precision` or, of the Trainer's, `precision_plugin`;
        Lightning sets those that are not given. Raises ConfigError for other names, and for settings of the
        config that Lightning itself has.
    """

    def __init__(self, config: Config | None = None, **parts: Any) -> None:
        self.config = checked(config)
        if others := sorted(parts.keys() - PARTS):
            raise ConfigError(f"ZeroStrategy takes no {', '.join(others)}: settings are zero.Config's")
        timeout = timedelta(seconds=self.config.timeout)
        super().__init__(timeout=timeout, **parts)  # type: ignore[call-arg]  # of Lightning's class

    @property
    def lightnings_device(self) -> torch.device:
        """What Lightning has chosen for this process."""
        return super().root_device  # type: ignore[misc,no-any-return]  # of Lightning's class

    @property
    def root_device(self) -> torch.device:
        return accelz.current().device if torch.distributed.is_initialized() else self.lightnings_device

    def join(self, precision: Any) -> None:
        """Bind this process to its device, and meet the job's other ranks. precision: Fabric's, or the
        Trainer's plugin; of mixed precision, autocast and its loss scaler serve the device from now on, where
        Lightning does not know it."""
        join_job(self.cluster_environment, self.lightnings_device, self.config.timeout)  # type: ignore[attr-defined]
        kind = accelz.current().device.type
        if hasattr(precision, "scaler") and precision.device != kind:
            precision.device = kind
            if precision.scaler is not None:
                precision.scaler = torch.amp.GradScaler(kind)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        call = super().all_gather  # type: ignore[misc]
        return by_way_of_host(call, tensor, group=group, sync_grads=sync_grads)


class ZeroStrategy(OnAccelz, DDPStrategy):
    """`Fabric(strategy=ZeroStrategy(zero.Config(...)))`: models are sharded as the config says.

    `fabric.setup(model, *optimizers)` shards; `engine_of(model)` then gives the engine, for what Fabric has
    no call for. Gradients are averaged over ranks and add up until `optimizer.zero_grad()`, as in
    DistributedDataParallel. See `OnAccelz` for what it takes and raises.
    """

    def __init__(self, config: Config | None = None, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._backward_sync_control = _NoSync(self)
        self._engines: list[Engine] = []
        self._parameters: dict[Optimizer, list[nn.Parameter]] = {}

    def engine_of(self, module: nn.Module) -> Engine:
        """The engine that trains a module. Raises UsageError if the strategy has not set it up."""
        inner = getattr(module, "module", None)  # of what `fabric.setup` returns
        for engine in self._engines:
            if engine.module in (module, inner):
                return engine
        raise UsageError(
            f"{type(module).__name__} has no engine: set it up with `fabric.setup(model, optimizer)` first"
        )

    # -- setting up ------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        precision: Any = self.precision
        self.join(precision)
        precision.convert_module = partial(convert, precision.convert_module)
        super().setup_environment()

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: a unit of the model is moved when it is sharded."""

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        self._parameters |= {each: parameters_of(each) for each in optimizers}
        self._engines.append(initialize(module, optimizers, self.config))
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a model that is only read, or whose one optimizer is set up later."""
        self._engines.append(initialize(module, None, self.config))
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Have the model's engine train with an optimizer made from its parameters. One for each model."""
        mine = parameters_of(optimizer)
        ids = {id(parameter) for parameter in mine}
        for engine in self._engines:
            if any(id(parameter) in ids for parameter in engine.module.parameters()):
                engine.attach(optimizer)
                self._parameters[optimizer] = mine
                return optimizer
        raise UsageError(
            f"this {type(optimizer).__name__} has parameters of no model that was set up: make it from "
            "model.parameters() after `model = fabric.setup_module(model)`"
        )

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """What `with fabric.init_module():` builds gets values when it is sharded, and is never whole."""
        stack = ExitStack()
        stack.enter_context(self.precision.module_init_context())
        stack.enter_context(init())
        return stack

    # -- ranks -----------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return by_way_of_host(super().all_reduce, tensor, group=group, reduce_op=reduce_op)

    # -- training --------------------------------------------------------------------------------------

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients of an optimizer's parameters, over all ranks; return the norm before."""
        self.precision.unscale_gradients(optimizer)
        parameters = self._parameters_of(optimizer)
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of the gradients. One parameter's whole gradient at a time is gathered."""
        self.precision.unscale_gradients(optimizer)
        nn.utils.clip_grad_value_(self._parameters_of(optimizer), clip_val, foreach=False)

    def _parameters_of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The model's parameters; its param_groups have this rank's slices of them."""
        if optimizer not in self._parameters:
            raise UsageError(
                f"this {type(optimizer).__name__} was not set up: call `fabric.setup(model, optimizer)`"
            )
        return self._parameters[optimizer]

    # -- checkpoints -----------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save a state with a model to a directory, a share of it by every rank; any other to a file.

        What is neither model nor optimizer is rank 0's, and anything that torch.save takes. Optimizers are
        saved with their model, named or not. filter: of the model, by the names and parameters to keep.
        """
        key, engine = self._engine_in(state)
        if engine is None:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if storage_options is not None:
            raise ConfigError("storage_options: checkpoints of sharded models are written to a file system")
        if filter is not None and filter.keys() - {key}:
            raise ConfigError("filter: only a model's parameters can be left out of a sharded checkpoint")
        rest = {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in state.items()
            if not isinstance(value, (nn.Module, Optimizer))
        }
        keep = (filter or {}).get(key)
        include = [n for n, p in engine.module.named_parameters() if keep(n, p)] if keep else None
        engine.save_checkpoint(path, {REST: packed(rest)}, include=include)

    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Restore a state from what save_checkpoint wrote; return what it has besides.

        A state without an optimizer restores the model's weights only. weights_only: of torch.load, for what
        is neither model nor optimizer.
        """
        if not Path(path).is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)  # type: ignore[no-any-return]
        state = {} if state is None else state
        named = state if isinstance(state, dict) else {"state": state}
        _, engine = self._engine_in(named)
        if engine is None:
            raise UsageError(
                f"{path} has a sharded model: load it with the model, as in fabric.load(path, "
                '{"model": model, "optimizer": optimizer})'
            )
        optimizes = any(isinstance(value, Optimizer) for value in named.values())
        loaded = engine.load_checkpoint(path, strict=strict, weights_only=not optimizes)
        rest = unpacked(loaded.state[REST], weights_only) if REST in loaded.state else {}
        wanted = [name for name, v in named.items() if not isinstance(v, (nn.Module, Optimizer))]
        if strict and (missing := [name for name in wanted if name not in rest]):
            has = ", ".join(map(repr, rest)) or "nothing"
            raise CheckpointError(f"{path} has {has} besides the model, and no {missing[0]!r}")
        for name in wanted:
            if name in rest and hasattr(named[name], "load_state_dict"):
                named[name].load_state_dict(rest.pop(name))
            elif name in rest:
                named[name] = rest.pop(name)
        return rest

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The whole model in rank 0's host memory, {} on other ranks. Collective."""
        return self.engine_of(module).state_dict()

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Load a whole model from rank 0's `state_dict`. Collective."""
        self.engine_of(module).load_state_dict(state_dict, strict)

    def _engine_in(self, state: Mapping[str, Any]) -> tuple[str, Engine | None]:
        """The one model in a state that has an engine, with its key."""
        engines = {id(engine.module): engine for engine in self._engines}
        found = [(key, engines[id(value)]) for key, value in state.items() if id(value) in engines]
        if len(found) > 1:
            raise UsageError(
                f"each of the models {', '.join(repr(key) for key, _ in found)} has an engine: save and load "
                "each with a call and a directory of its own"
            )
        return found[0] if found else ("", None)

    def teardown(self) -> None:
        for engine in self._engines:
            engine.wait_for_checkpoint()
        super().teardown()


class _NoSync(_BackwardSyncControl):
    """`fabric.no_backward_sync(model)`."""

    def __init__(self, strategy: ZeroStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._strategy.engine_of(module).no_sync() if enabled else nullcontext()


# -- for Fabric and the Trainer ----------------------------------------------------------------------------


def checked(config: Config | None) -> Config:
    """The settings. Raises ConfigError for those that the loop has itself."""
    config = Config() if config is None else config
    if config.gradient_accumulation_steps is not None:
        raise ConfigError(
            f"gradient_accumulation_steps={config.gradient_accumulation_steps}: leave it out; in Lightning, "
            "Trainer(accumulate_grad_batches=...) or Fabric's loop says when to step"
        )
    return config


def join_job(environment: ClusterEnvironment, device: torch.device, timeout: float) -> None:
    """Bind this process to its device, and meet the job's other ranks, which the environment knows.

    device: what Lightning has chosen; only its type counts. Raises UsageError if accelz has chosen another
    type, or if the process was started in a job of another size.
    """
    accelerator = accelz.current()
    if device.type != accelerator.device.type:
        raise UsageError(
            f"Lightning has chosen the device {device.type!r} and accelz {accelerator.device.type!r}: set "
            f"ACCELZ_DEVICE to the backend to use, or give accelerator={DEVICE_NAME!r} to Trainer or Fabric"
        )
    ranks = environment.world_size()
    if not torch.distributed.is_initialized() and ranks > 1:
        os.environ |= {  # as torchrun sets them
            "RANK": str(environment.global_rank()),
            "LOCAL_RANK": str(environment.local_rank()),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": environment.main_address,
            "MASTER_PORT": str(environment.main_port),
        }
    accelerator.bind(environment.local_rank())
    size = accelerator.collectives.init(timeout).size
    if size != ranks:
        raise UsageError(
            f"the job has {size} ranks, and devices and num_nodes make {ranks}: give Trainer or Fabric the "
            "number of processes that were started"
        )


def by_way_of_host(call: Callable[..., Any], value: Any, **options: Any) -> Any:
    """Call a collective, with a copy on the host of what is on a device unknown to torch.distributed."""
    if not isinstance(value, Tensor) or f"{value.device.type}:" in accelz.current().collectives.spec:
        return call(value, **options)
    result = call(value.to(accelz.HOST), **options)
    return result.to(value.device)


def convert(conversion: Callable[[nn.Module], nn.Module], module: nn.Module) -> nn.Module:
    """Convert a module as a precision plugin does, unless it was born sharded: then it was born converted."""
    if any(isinstance(parameter, ShardedParameter) for parameter in module.parameters()):
        return module
    return conversion(module)


def packed(values: Any) -> Tensor:
    """Anything that torch.save takes, as bytes: a checkpoint's state has values of few types only."""
    stream = io.BytesIO()
    torch.save(values, stream)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


def unpacked(stored: Tensor, weights_only: bool | None) -> Any:
    """What `packed` has packed, with tensors on the host. weights_only: as in torch.load."""
    return torch.load(io.BytesIO(stored.numpy().tobytes()), accelz.HOST, weights_only=weights_only)


def registered(registry: Any, name: str, kind: type) -> None:
    registry.register(name, kind, description=(kind.__doc__ or "").splitlines()[0], override=True)


registered(STRATEGY_REGISTRY, NAME, ZeroStrategy)
registered(ACCELERATOR_REGISTRY, DEVICE_NAME, AccelzAccelerator)
