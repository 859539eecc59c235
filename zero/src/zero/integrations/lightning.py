"""Lightning's Trainer trains with the engine.

    trainer = Trainer(devices=8, strategy=ZeroStrategy(zero.Config(stage=3)))
    trainer.fit(module, loader)

The module and the Trainer's other arguments stay as they are. `Trainer(strategy="zero")` works too, once this
module is imported, for `zero.Config()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

import accelz
from zero.config.training import Config
from zero.deferred.deferred_init import init
from zero.engine import Engine
from zero.errors import CheckpointError, ConfigError, StateError, UsageError
from zero.integrations import fabric
from zero.integrations.fabric import (
    DEVICE_NAME,
    NAME,
    REST,
    OnAccelz,
    by_way_of_host,
    convert,
    packed,
    registered,
    unpacked,
)
from zero.integrations.lightning_callbacks import EMA as EMA
from zero.integrations.lightning_callbacks import KEY
from zero.integrations.lightning_callbacks import Metrics as Metrics
from zero.optimizer.joint import parameters_of
from zero.setup.initialization import initialize

PRIVATE_NAMES = ("lightning.pytorch.strategies.DDPStrategy()._layer_sync",)
"""What this module uses of Lightning's private names; `()` stands for an object of the class."""

ENGINE = "zero_engine"
"""The attribute by which a LightningModule holds its engine: several Trainers may have it in turn."""


class AccelzAccelerator(fabric.AccelzAccelerator, Accelerator):
    """The Trainer's view of the device that accelz has chosen: `Trainer(accelerator="accelz")`.

    Only needed for a device that Lightning does not know by itself.
    """

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Memory of this process's device, in bytes."""
        stats = accelz.current().memory.stats()
        return {f"memory.{name}": value for name, value in vars(stats).items()}


class ZeroStrategy(OnAccelz, DDPStrategy):
    """`Trainer(strategy=ZeroStrategy(zero.Config(...)))`: the module is sharded as the config says.

    `engine` is what trains it, for what the Trainer has no call for. Gradients are averaged over ranks, as in
    DistributedDataParallel. Checkpoints are directories, of which every rank writes its share; with weights
    only, they are single files that `LightningModule.load_from_checkpoint` reads. Raises ConfigError for
    settings that the Trainer itself has.
    """

    def __init__(self, config: Config | None = None, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._parameters: dict[Optimizer, list[nn.Parameter]] = {}
        self._frozen: list[nn.Parameter] = []
        self._fits = self._failed = False

    @property
    def engine(self) -> Engine:
        """Raises UsageError before the module is set up."""
        engine: Engine | None = vars(self.lightning_module or self).get(ENGINE)
        if engine is None:
            raise UsageError("there is no engine yet: the Trainer makes it after configure_model")
        return engine

    # -- setting up ------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        self.join(self.precision_plugin)
        super().setup_environment()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with self.precision_plugin.tensor_init_context():
            yield

    def model_sharded_context(self) -> AbstractContextManager[None]:
        """What `configure_model` builds gets values when it is sharded, and is never whole."""
        return init()

    def setup(self, trainer: Trainer) -> None:
        self.accelerator.setup(trainer)
        self._failed = False
        module = self.lightning_module
        self._fits = trainer.state.fn == TrainerFn.FITTING
        there: Engine | None = vars(module).get(ENGINE)
        if there is None:
            convert(self.precision_plugin.convert_module, module)
            if self._layer_sync:
                self._layer_sync.apply(module)
        if self._fits:
            _check_callbacks(trainer)
            self.setup_optimizers(trainer)
            self._parameters = {each: parameters_of(each) for each in self.optimizers}
            self._redirect(module)
        optimizers = self.optimizers if self._fits else None
        if there is None:
            setattr(module, ENGINE, initialize(module, optimizers, self.config))
        elif optimizers is not None:
            there.attach(optimizers)
        self.setup_precision_plugin()

    def _redirect(self, module: LightningModule) -> None:
        """Give what looks for parameters in optimizers the model's: they have this rank's slices of them."""
        plugin: Any = self.precision_plugin
        plugin.main_params = self._parameters_of
        plugin.clip_grad_by_value = self._clip_by_value
        module.toggle_optimizer = self._toggle
        module.untoggle_optimizer = self._untoggle

    def model_to_device(self) -> None:
        """Do nothing: a unit of the model is moved when it is sharded."""

    # -- ranks -----------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return by_way_of_host(super().reduce, tensor, group=group, reduce_op=reduce_op)

    # -- steps -----------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._as_forward("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._as_forward("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._as_forward("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._as_forward("predict_step", *args, **kwargs)

    def _as_forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method as the module's forward, so that parameters of no submodule are gathered, too."""
        module = self.lightning_module
        own = module.__dict__.pop("forward", None)

        def restore() -> None:
            module.__dict__.pop("forward", None)
            if own is not None:
                module.forward = own

        def call(*args: Any, **kwargs: Any) -> Any:
            restore()  # the method may itself call the module
            return getattr(module, method)(*args, **kwargs)

        module.forward = call
        try:
            return module(*args, **kwargs)
        finally:
            restore()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.engine.no_sync():
            yield

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """With Config(loss_scale=...) the engine scales the loss, unless Lightning does."""
        engine, plugin = self.engine, self.precision_plugin
        if engine.config.loss_scale is None or getattr(plugin, "scaler", None) is not None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)  # type: ignore[no-any-return]
        loss = plugin.pre_backward(closure_loss, self.lightning_module)
        engine.backward(loss)
        return plugin.post_backward(loss, self.lightning_module)  # type: ignore[no-any-return]

    def _parameters_of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        return self._parameters[getattr(optimizer, "optimizer", optimizer)]  # from the Trainer's wrapper

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        nn.utils.clip_grad_value_(self._parameters_of(optimizer), clip_val, foreach=False)

    def _toggle(self, optimizer: Optimizer) -> None:
        """Freeze the parameters of all other optimizers."""
        kept = {id(parameter) for parameter in self._parameters_of(optimizer)}
        every = [p for parameters in self._parameters.values() for p in parameters]
        self._frozen = [p for p in every if p.requires_grad and id(p) not in kept]
        for parameter in self._frozen:
            parameter.requires_grad_(False)

    def _untoggle(self, optimizer: Optimizer) -> None:
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = []

    # -- checkpoints -----------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: `save_checkpoint` has the engine save the model."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing: `save_checkpoint` has the engine save it."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save to a directory, a share of it by every rank; with weights only, rank 0 saves to a file.

        With the plugin AsyncCheckpointIO, the directory is written while training goes on.
        """
        averaged = self._averaged()
        if "optimizer_states" not in checkpoint:
            with averaged.average.applied() if averaged and averaged.average else nullcontext():
                checkpoint["state_dict"] |= self.engine.state_dict()
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise ConfigError("storage_options: checkpoints of sharded models are written to a file system")
        background = isinstance(self.checkpoint_io, AsyncCheckpointIO)
        path = Path(self.broadcast(filepath))
        if path.name.startswith("."):  # the Tuner's, which it removes: `latest` is to go with it
            path = path / "saved"
        self.engine.save_checkpoint(
            path,
            {REST: packed(checkpoint)} | ({KEY: averaged.average} if averaged and averaged.average else {}),
            async_=background,
        )

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restore model and optimizers from a directory; return the rest, or all that a file has.

        Raises StateError for a file to resume from that another strategy has saved, and CheckpointError for
        what no Trainer has saved.
        """
        path = Path(self.broadcast(checkpoint_path))
        if path.is_dir():
            strict = self.lightning_module.strict_loading
            averaged = self._averaged() if self._fits else None
            restore = averaged.saved_in(path, self.engine) if averaged else {}
            loaded = self.engine.load_checkpoint(
                path, restore=restore, strict=strict, weights_only=not self._fits
            )
            if REST not in loaded.state:
                raise CheckpointError(
                    f"{path} was saved by an engine, not by a Trainer, and has no state of loops: load it "
                    "with trainer.strategy.engine.load_checkpoint, e.g. in the module's on_train_start"
                )
            rest: dict[str, Any] = unpacked(loaded.state[REST], weights_only)
            return rest
        checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only)
        if self._fits and any(checkpoint.get("optimizer_states", ())):
            raise StateError(
                f"{path} has optimizer state as another strategy has saved it: resume from a checkpoint of "
                "this strategy, or begin with the weights alone, as in Module.load_from_checkpoint(path)"
            )
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if checkpoint["state_dict"]:  # a file's: what is in a directory has been loaded
            self.engine.load_state_dict(checkpoint["state_dict"], strict)

    def _averaged(self) -> EMA | None:
        return next((c for c in self.lightning_module.trainer.callbacks if isinstance(c, EMA)), None)

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    def teardown(self) -> None:
        """Leave the module sharded, for other stages."""
        if ENGINE in vars(self.lightning_module or self) and not self._failed:
            self.engine.wait_for_checkpoint()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _check_callbacks(trainer: Trainer) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise ConfigError(
                f"{type(callback).__name__} averages whole models on every rank, and the module is sharded: "
                "use zero.integrations.lightning.EMA"
            )


registered(StrategyRegistry, NAME, ZeroStrategy)
registered(AcceleratorRegistry, DEVICE_NAME, AccelzAccelerator)
