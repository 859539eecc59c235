"""Hugging Face Accelerate: its `Accelerator`, which shards what it prepares.

    accelerator = Accelerator(zero_config=zero.Config(stage=3))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Needs `pip install accelz-zero[accelerate]`. Where DistributedDataParallel would be, there is an engine; what
this class does not override is as in Accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

import accelz
from zero.config.training import Config
from zero.engine import Engine
from zero.errors import ConfigError, UsageError, some
from zero.optimizer.joint import parameters_of
from zero.setup.initialization import initialize

PRIVATE = ("_models", "_optimizers", "_schedulers")
"""Attributes of Accelerate's Accelerator that are used here and are no public names. Of AcceleratedOptimizer
it is `__setstate__`, which looks for the optimizer's step anew."""

DEVICE = "ACCELERATE_TORCH_DEVICE"
ENGINE = "_zero_engine"  # an attribute of models and optimizers: an engine lives as long as they do
_OTHERS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")


def _is_extension() -> bool:
    """Whether the chosen device is a vendor's extension of torch."""
    return accelz.current().device.type == torch._C._get_privateuse1_backend_name()


def _with_extension(options: dict[str, Any]) -> dict[str, Any]:
    """Accelerate's options, by which it uses a device that is a vendor's extension of torch, too.

    Its way for a device that it may not know is a variable of the environment beside the option for the host,
    which the first Accelerator of a process heeds. It gets no number: the engine makes each rank's device the
    current one.
    """
    if DEVICE in os.environ or not _is_extension():
        return options
    os.environ[DEVICE] = accelz.current().device.type
    return {accelz.HOST.type: True} | options


def use_extension(arguments: Any) -> None:
    """The same for TrainingArguments, which have chosen a device already, before a Trainer looks at it.

    It gets a number: a Trainer moves the model before there is an engine. The choice is kept in Accelerate's
    state and in the cache of the property that made it, anew for each TrainingArguments. A variable that
    names another kind of device is left to the user.
    """
    accelerator = accelz.current()
    told = os.environ.get(DEVICE, accelerator.device.type).partition(":")[0]
    if told != accelerator.device.type or not _is_extension():
        return
    accelerator.bind(arguments.local_process_index)
    os.environ[DEVICE] = str(accelerator.device)
    arguments.distributed_state.device = vars(arguments)["_setup_devices"] = accelerator.device


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator`, whose `prepare` makes an engine of each model and its optimizers.

    zero_config: the engines' settings; `zero.Config()` where it is left out. Precision is Accelerate's:
    mixed_precision="bf16" is autocast over parameters in their own dtype. So is accumulation.

    Raises ConfigError where Accelerate is to use another engine or another device, and where the settings
    count micro-batches.
    """

    _models: list[nn.Module]
    _optimizers: list[Any]

    def __init__(self, *args: Any, zero_config: Config | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **_with_extension(kwargs))
        self._begin(zero_config)

    @classmethod
    def adopt(cls, accelerator: accelerate.Accelerator, zero_config: Config | None) -> None:
        """Make an accelerator that has prepared nothing yet one of this class."""
        accelerator.__class__ = cls
        accelerator._begin(zero_config)

    def _begin(self, zero_config: Config | None) -> None:
        self.zero_config = zero_config or Config()
        self._waiting: list[Optimizer] = []  # for their models
        self._options: dict[str, Any] | None = None  # of a save or load that is under way
        self._check()
        self.register_save_state_pre_hook(self._save_engines)
        self.register_load_state_pre_hook(self._load_engines)

    def _check(self) -> None:
        if self.zero_config.gradient_accumulation_steps is not None:
            raise ConfigError(
                "Accelerate counts micro-batches itself: leave gradient_accumulation_steps out of "
                "zero.Config, and give it to the Accelerator or to TrainingArguments"
            )
        if self.distributed_type.name in _OTHERS:
            raise ConfigError(
                f"Accelerate is set up for {self.distributed_type.name}, which excludes zero: leave out its "
                "plugin, also in the file of `accelerate config` and in ACCELERATE_USE_... of the environment"
            )
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if self.num_processes != ranks:
            raise ConfigError(
                f"Accelerate has {self.num_processes} processes, but the job {ranks} ranks: if these are "
                "CPUs, ask for them by Accelerator(cpu=True), TrainingArguments(use_cpu=True), or "
                "ACCELERATE_USE_CPU=1 in the environment"
            )
        device = accelz.current().device
        if self.device.type != device.type:
            raise ConfigError(
                f"Accelerate uses {self.device}, but accelz {device}: choose the same device by "
                f"{DEVICE} or cpu=True, and by ACCELZ_DEVICE"
            )

    def engine_of(self, prepared: nn.Module | Optimizer) -> Engine | None:
        """Return the engine that a model or optimizer is part of, as prepared or not; None without one."""
        engine: Engine | None = vars(self._plain(prepared)).get(ENGINE)
        return engine

    def _plain(self, prepared: Any) -> Any:
        """A model or optimizer without what Accelerate and torch.compile put around it."""
        while isinstance(prepared, AcceleratedOptimizer):
            prepared = prepared.optimizer
        if isinstance(prepared, nn.Module):
            return self.unwrap_model(prepared, keep_torch_compile=False)
        return prepared

    # -- prepare ---------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As in Accelerate. A model and its optimizers may be given in one call, in any order, or in several;
        a model that gets no optimizer is sharded to be read."""
        self._shard(args)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """As in Accelerate with evaluation_mode=True: autocast and compilation only. Unless that is given,
        the model is sharded first."""
        if not evaluation_mode:
            self._shard((model,))
        placement = device_placement if self.engine_of(model) is None else False
        return super().prepare_model(model, device_placement=placement, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """As in Accelerate; the engine places its state."""
        self._shard((optimizer,))
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As in Accelerate, where it steps once for each process; but not without a prepared model."""
        prepared = super().prepare_scheduler(scheduler)
        self._link_schedulers()
        return prepared

    def _shard(self, given: Sequence[Any]) -> None:
        """Make engines of models, with the optimizers that are there, and give engines optimizers that have
        come since."""
        new = [self._plain(each) for each in given if isinstance(each, nn.Module | Optimizer)]
        new = [each for each in new if self.engine_of(each) is None]
        self._waiting += [o for o in new if isinstance(o, Optimizer) and o not in self._waiting]
        for model in [each for each in new if isinstance(each, nn.Module)]:
            optimizers = self._take(model)
            engine = initialize(model, optimizers or None, self.zero_config)
            self._mark(engine, model, *optimizers)
            if self.zero_config.stage == 3 and self.num_processes > 1 and hasattr(model, "generation_config"):
                _generate_together(model, engine)
        for model in self._models:
            known = self.engine_of(model)
            if known is not None and (optimizers := self._take(model)):
                known.attach(optimizers)
                self._mark(known, *optimizers)
        for prepared in self._optimizers:  # with a GradScaler, they keep the step from before the engine
            prepared.__setstate__({})
        self._link_schedulers()

    def _take(self, model: nn.Module) -> list[Optimizer]:
        """The optimizers of a model's parameters among those that wait."""
        own = set(model.parameters())
        found = [each for each in self._waiting if own.issuperset(parameters_of(each))]
        self._waiting = [each for each in self._waiting if each not in found]
        return found

    def _mark(self, engine: Engine, *parts: nn.Module | Optimizer) -> None:
        for part in parts:
            setattr(part, ENGINE, engine)

    def _link_schedulers(self) -> None:
        for each in self._schedulers:
            optimizer = getattr(each.scheduler, "optimizer", None)
            linked = optimizer is None or self.engine_of(optimizer) is not None
            each.step_with_optimizer = self.step_scheduler_with_optimizer and linked

    # -- training --------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As in Accelerate. Raises UsageError for an optimizer that was prepared without its model, which
        would step with the gradients of one rank."""
        if self._waiting:
            names = some([type(each).__name__ for each in self._waiting])
            raise UsageError(
                f"backward() was called with an optimizer whose model is not prepared: {names}. Give "
                "accelerator.prepare() the model, too; an optimizer may have the parameters of one model only"
            )
        super().backward(loss, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """As in Accelerate."""
        engine = self.engine_of(model)
        with super().no_sync(model) if engine is None else engine.no_sync():
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Raise UsageError if ranks are to make different numbers of passes, which engines make together."""
        if not (self.even_batches if even_batches is None else even_batches):
            raise UsageError(
                "join_uneven_inputs() with even_batches=False: the ranks of an engine make every pass "
                "together. Leave even_batches=True, or end each epoch on all ranks with the shortest loader"
            )
        yield

    # -- whole values (collective) ---------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole model on rank 0, and {} on other ranks. Collective, as are `save_model`,
        `save_state` and `load_state`."""
        engine = self.engine_of(model)
        if engine is None:
            state: dict[str, Any] = super().get_state_dict(model, unwrap)
            return state
        return {} if self._options is not None else engine.state_dict()

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any
    ) -> Any:
        """As in Accelerate, with a checkpoint of each engine in place of models' and optimizers' files.

        options: for `Engine.save_checkpoint`, such as trainable_only.
        """
        with self._apart(options):
            return super().save_state(output_dir, safe_serialization)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Load what `save_state` has saved, at any number of ranks. options: for `Engine.load_checkpoint`."""
        with self._apart(options):
            super().load_state(input_dir, load_kwargs)

    @contextmanager
    def _apart(self, options: dict[str, Any]) -> Iterator[None]:
        """Keep optimizers of engines from being saved or loaded by themselves."""
        every = list(self._optimizers)
        self._options = options
        self._optimizers = [each for each in every if self.engine_of(each) is None]
        try:
            yield
        finally:
            self._options, self._optimizers = None, every

    def _save_engines(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        options, self._options = self._options or {}, None  # hooks that follow may ask for whole values
        for name, engine in self._engines(models):
            engine.save_checkpoint(Path(output_dir) / name, **options)
        kept = [w for w, model in zip(weights, models, strict=True) if self.engine_of(model) is None]
        weights[:] = kept

    def _load_engines(self, models: list[nn.Module], input_dir: str) -> None:
        for name, engine in self._engines(models):
            engine.load_checkpoint(Path(input_dir) / name, **(self._options or {}))
        models[:] = [model for model in models if self.engine_of(model) is None]

    def _engines(self, models: Sequence[nn.Module]) -> list[tuple[str, Engine]]:
        found = [engine for model in models if (engine := self.engine_of(model)) is not None]
        return [(f"zero_{i}", engine) for i, engine in enumerate(found)]


def _generate_together(model: Any, engine: Engine) -> None:
    """Let a model of Transformers, or of PEFT, go on making passes once its rank's outputs are complete, as
    long as those of another rank are not. Inside `zero.gathered(model)` passes need no other rank."""
    own = model.generate

    @wraps(own)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if not all(unit.resident or unit.held_exact for unit in engine.units):
            kwargs["synced_gpus"] = True  # Seq2SeqTrainer says False where it knows no engine
        return own(*args, **kwargs)

    model.generate = generate
