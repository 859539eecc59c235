"""Hugging Face Trainer: `Trainer`, and `TrainerMixin` for its subclasses, such as TRL's.

    class SFT(TrainerMixin, SFTTrainer): ...

    trainer = SFT(model, args, train_dataset=rows, zero_config=zero.Config(stage=3))

Needs `pip install accelz-zero[transformers]`. TrainingArguments mean what they mean with
DistributedDataParallel; a checkpoint's folder has an engine's checkpoint in place of the optimizer's file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import transformers
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from zero.config.training import Config
from zero.engine import Engine
from zero.errors import CheckpointError, ConfigError
from zero.integrations.accelerate import ENGINE, Accelerator, use_extension
from zero.integrations.auto_values import config_of
from zero.integrations.trl import Following, teach_gathering
from zero.observe.observation import Observing
from zero.observe.observer import Observer, Step
from zero.sharding.guard import has_engine
from zero.whole.export import has_adapter
from zero.whole.gathered import gathered

PRIVATE = (
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_save",
    "_save_optimizer_and_scheduler",
)
"""Methods of transformers' Trainer that are overridden here and are no public names."""

_FOLDER = "zero"  # in a checkpoint's folder


class TrainerMixin:
    """Put before a Trainer among the base classes: it trains with an engine.

    zero_config: the engine's settings; `zero.Config()` where it is left out. Or a DeepSpeed configuration, a
    dict or the path of a JSON file, whose "auto" values are those of TrainingArguments. Raises ConfigError
    for arguments that exclude an engine.
    """

    accelerator: Any
    args: Any
    lr_scheduler: Any
    model: nn.Module
    state: Any

    def __init__(
        self, *args: Any, zero_config: Config | Mapping[str, Any] | str | Path | None = None, **kwargs: Any
    ) -> None:
        self.zero_config = zero_config
        super().__init__(*args, **kwargs)
        self._shard_reference()
        if getattr(self.args, "enable_jit_checkpoint", False):
            self._stop_together()

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator one that shards."""
        use_extension(self.args)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]  # of the Trainer after this
        if isinstance(self.zero_config, Mapping | str | Path):
            self.zero_config = config_of(self.zero_config, self.args, self.accelerator.num_processes)
            if self.zero_config.precision == "bf16":  # of the parameters, as in DeepSpeed, without autocast
                self.accelerator.native_amp = False
        Accelerator.adopt(self.accelerator, self.zero_config)
        teach_gathering()
        if self.args.save_on_each_node:
            raise ConfigError(
                "TrainingArguments(save_on_each_node=True): an engine has whole weights on rank 0 only, so "
                "leave it out and save to a folder that all machines share"
            )

    @property
    def engine(self) -> Engine | None:
        """The model's engine; None before training."""
        return Accelerator.engine_of(self.accelerator, self.model)

    def add_callback(self, callback: Any) -> None:
        """As in Trainer. TRL's callback that lets a reference follow the model gets whole values."""
        follows = hasattr(callback, "sync_target_model") and not isinstance(callback, type)
        super().add_callback(Following(callback, self) if follows else callback)  # type: ignore[misc]

    def _shard_reference(self) -> None:
        """At stage 3, shard the model that a trainer of TRL compares with, unless its user has."""
        reference = getattr(self, "ref_model", None)
        stage = self.accelerator.zero_config.stage
        if stage == 3 and reference is not None and not has_engine(reference):
            self.accelerator._shard((reference,))

    def _stop_together(self) -> None:
        """Let ranks that are told to end (SIGTERM) save at the same step, whichever is told when."""
        alone = self.pop_callback(JITCheckpointCallback)  # type: ignore[attr-defined]
        self.add_callback(_Stopping(alone, self.accelerator))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As in Trainer. A training loss comes with what `Metrics` has been told."""
        if "loss" in logs:
            for callback in self.callback_handler.callbacks:  # type: ignore[attr-defined]
                logs |= callback.take() if isinstance(callback, Metrics) else {}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    # -- saving (collective: Trainer calls these on every rank) ----------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.engine is None or state_dict is not None:
            super()._save(output_dir, state_dict)  # type: ignore[misc]
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        with _without_weights(self.model):
            super()._save(str(folder), {})  # type: ignore[misc]
        self.engine.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.engine is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        self.engine.save_checkpoint(
            Path(output_dir) / _FOLDER,
            {"scheduler": self.lr_scheduler},
            trainable_only=has_adapter(self.model),
        )

    # -- loading ---------------------------------------------------------------------------------------

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.engine is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        elif (folder := Path(checkpoint) / _FOLDER).is_dir():
            self.engine.load_checkpoint(folder, restore={"scheduler": self.lr_scheduler})
        elif any(Path(checkpoint).glob("optimizer.*")):
            raise CheckpointError(
                f"{checkpoint} has an optimizer state that was saved without zero, which would be left out: "
                "to begin with these weights alone, load them by from_pretrained and train without "
                "resume_from_checkpoint"
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.engine is not None and (Path(resume_from_checkpoint) / _FOLDER).is_dir():
            return  # the engine's checkpoint has the weights, too
        with self._whole():
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint) / _FOLDER
        if self.engine is not None and folder.is_dir():
            self.engine.load_checkpoint(folder, weights_only=True)
            return
        with self._whole():
            super()._load_best_model()  # type: ignore[misc]

    def _whole(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.engine is None else gathered(self.model, write_rank=0)


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with an engine, see `TrainerMixin`."""


class Metrics(transformers.TrainerCallback, Observer):
    """`Trainer(..., callbacks=[Metrics()])`: with each loss, the Trainer logs what observers of the engine
    are told, such as zero/seconds/forward, as a mean over the steps since the loss before; on rank 0."""

    def __init__(self) -> None:
        self._told: dict[str, list[float]] = defaultdict(list)
        self._observing: Observing | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        plain = extract_model_from_parallel(model, keep_torch_compile=False)
        engine: Engine | None = vars(plain).get(ENGINE)
        self._observing = None if engine is None else engine.observe(self)

    def step(self, step: Step) -> None:
        for name, number in step.metrics().items():
            if name not in _TRAINERS:
                self._told[f"zero/{name}"].append(number)

    def take(self) -> dict[str, float]:
        """The means, of steps that are not told again."""
        means = {name: fmean(numbers) for name, numbers in self._told.items()}
        self._told.clear()
        return means

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._observing is not None:
            self._observing.close()
            self._observing = None  # which holds this callback


_TRAINERS = ("learning_rate", "grad_norm")  # what the Trainer logs itself


class _Stopping(transformers.TrainerCallback):
    """Transformers' JITCheckpointCallback, with a step that ranks agree on to save and stop after."""

    def __init__(self, callback: Any, accelerator: Any) -> None:
        self._callback = callback
        self._accelerator = accelerator
        self._stopped = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stopped = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._callback.jit_manager.is_checkpoint_requested:
            self._accelerator.set_trigger()
        if self._accelerator.check_trigger():
            self._callback.jit_manager.is_checkpoint_requested = False
            control.should_save = control.should_training_stop = self._stopped = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stopped:  # there may be seconds left, and the step is saved
            control.should_save = control.should_evaluate = False

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._callback.on_train_end(*args, **kwargs)


@contextmanager
def _without_weights(model: Any) -> Iterator[None]:
    """In the block, the model saves nothing: only the Trainer's own files are written."""
    model.save_pretrained = lambda *_, **__: None
    try:
        yield
    finally:
        del model.save_pretrained
