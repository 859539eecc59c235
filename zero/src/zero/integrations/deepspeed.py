"""DeepSpeed's call: `initialize` takes its arguments and its configuration, and returns what it returns.

    engine, optimizer, loader, scheduler = initialize(model=model, config="ds.json", training_data=dataset)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

The loop stays; DeepSpeed is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from zero.checkpoint.load import Loaded
from zero.config.deepspeed import BUILT, BatchSizes, convert
from zero.config.settings_file import read_settings
from zero.engine import Engine
from zero.errors import ConfigError, UsageError
from zero.integrations.deepspeed_blocks import Parameters, build_optimizer, build_scheduler
from zero.migration_hints import explained
from zero.setup.initialization import initialize as zero_initialize

_SAVED = "lr_scheduler"  # its key in the state of checkpoints


class DeepSpeedEngine(Engine):
    """An engine that steps the scheduler with the optimizer, and saves it, as DeepSpeed's does.

    lr_scheduler: the scheduler, or None. training_dataloader: what `training_data` became, or None.
    """

    lr_scheduler: Any
    training_dataloader: DataLoader[Any] | None
    _sizes: BatchSizes

    def step(self) -> bool:
        """As in zero.Engine; then the scheduler steps, unless the step was skipped.

        With a loss scale, learning whether it was skipped waits for the device.
        """
        skipped = self.skipped_steps if self.lr_scheduler is not None else 0
        stepped = super().step()
        if stepped and self.lr_scheduler is not None and self.skipped_steps == skipped:
            self.lr_scheduler.step()
        return stepped

    @explained
    def save_checkpoint(
        self, path: str | Path, state: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """As in zero.Engine, and the scheduler, in the state's "lr_scheduler"."""
        own = {} if self.lr_scheduler is None else {_SAVED: self.lr_scheduler}
        super().save_checkpoint(path, {**own, **(state or {})}, **options)

    @explained
    def load_checkpoint(
        self, path: str | Path, *, restore: Mapping[str, Any] | None = None, **options: Any
    ) -> Loaded:
        """As in zero.Engine, and the scheduler, unless `weights_only`."""
        own = {} if self.lr_scheduler is None or options.get("weights_only") else {_SAVED: self.lr_scheduler}
        return super().load_checkpoint(path, restore={**own, **(restore or {})}, **options)

    def train_batch_size(self) -> int | None:
        """Samples in an optimizer step of all ranks; None if the configuration has no batch size."""
        return self._sizes.train

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples in a micro-batch of one rank; None if the configuration has no batch size."""
        return self._sizes.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in an optimizer step."""
        return self._sizes.accumulation

    def get_lr(self) -> list[float]:
        """The learning rates of the param_groups."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | Callable[[Any], Optimizer] | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    process_group: dist.ProcessGroup | None = None,
    **others: Any,
) -> tuple[DeepSpeedEngine, Optimizer | None, DataLoader[Any] | None, Any]:
    """Return an engine, its optimizer, a data loader and a scheduler; None for what there is none of.

    config: DeepSpeed's configuration, as a dict or the path of a JSON file; without it, that of
        args.deepspeed_config. Keys are converted as by `zero.from_deepspeed`.
    optimizer, lr_scheduler: the object (of optimizers, also a list), or a function that makes it: of
        model_parameters, and of the optimizer. They take the place of the configuration's sections, from
        which they are built otherwise. engine.step() steps the scheduler, so the program does not.
    model_parameters: what to train: parameters or param_groups; None: all that require gradients.
    training_data: a data set. Each rank's loader has its share of it, in micro-batches, in another order in
        every epoch if `loader.sampler.set_epoch(epoch)` is called. Batches stay on the host.
    process_group: as in zero.initialize, in place of mpu= and mesh_param=.

    The model is sharded as by `zero.initialize`, and other errors are those it raises. Raises ConfigError for
    what cannot be converted or built, and UsageError for an argument without a counterpart.
    """
    for name in others:
        raise UsageError(f"initialize() takes no {name}=: {_ARGUMENTS.get(name, 'unknown; remove it')}")
    if model is None:
        raise UsageError("initialize() needs model=, a torch.nn.Module")
    given = dict(read_settings(_source(args, config)))
    optimizer_block, scheduler_block = (given.pop(section, None) for section in BUILT)
    drop_last = given.pop("dataloader_drop_last", False)
    ranks = dist.get_world_size(process_group) if dist.is_initialized() else None  # to be told by torchrun
    settings, sizes = convert(given, ranks)
    if training_data is not None and sizes.micro is None:
        raise ConfigError("training_data= needs 'train_micro_batch_size_per_gpu' in the configuration")
    built = _optimizer(optimizer, optimizer_block, model_parameters, model)
    if built is None and (lr_scheduler is not None or scheduler_block):
        raise ConfigError(
            "a scheduler needs an optimizer: give optimizer=, or 'optimizer' in the configuration"
        )
    engine = zero_initialize(model, built, settings, process_group)
    engine.__class__ = DeepSpeedEngine
    assert isinstance(engine, DeepSpeedEngine)
    engine._sizes = sizes
    engine.lr_scheduler = _scheduler(lr_scheduler, scheduler_block, engine.optimizer)
    engine.training_dataloader = None
    if training_data is not None:
        engine.training_dataloader = _loader(engine, training_data, collate_fn, drop_last)
    trained = None if built is None else engine.optimizer
    return engine, trained, engine.training_dataloader, engine.lr_scheduler


def _source(args: Any, config: Any) -> Any:
    """The configuration that is given. Raises UsageError if there is none, or two."""
    of_args = getattr(args, "deepspeed_config", None)
    if (config is None) is (of_args is None):
        said = "neither is given" if config is None else "both are given"
        raise UsageError(f"initialize() needs one of config= and args.deepspeed_config: {said}")
    return of_args if config is None else config


def _optimizer(
    given: Optimizer | Sequence[Optimizer] | Callable[[Any], Optimizer] | None,
    block: Mapping[str, Any] | None,
    parameters: Parameters | None,
    model: nn.Module,
) -> Optimizer | Sequence[Optimizer] | None:
    """The given optimizer, or else that of the configuration; None if there is none."""
    if given is None and not block:
        return None
    if given is not None and not callable(given):
        return given
    if parameters is None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return given(parameters) if given is not None else build_optimizer(block or {}, parameters, model)


def _scheduler(given: Any, block: Mapping[str, Any] | None, optimizer: Optimizer) -> Any:
    """The given scheduler, or else that of the configuration; None if there is none."""
    if given is None:
        return build_scheduler(block, optimizer) if block else None
    return given if hasattr(given, "step") else given(optimizer)


def _loader(
    engine: DeepSpeedEngine, data: Dataset[Any], collate: Callable[[list[Any]], Any] | None, drop_last: bool
) -> DataLoader[Any]:
    """This rank's share of a data set; an IterableDataset gives each rank its share itself."""
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(data, IterableDataset):
        sampler = DistributedSampler(data, engine.world_size, engine.rank)
    size = engine.train_micro_batch_size_per_gpu()
    return DataLoader(data, batch_size=size, sampler=sampler, collate_fn=collate, drop_last=drop_last)


_ARGUMENTS = {
    "config_params": "pass it as config=",
    "dist_init_required": "the ranks meet by torchrun's environment, or in a process group that is there",
    "distributed_port": "torchrun sets the port: --master-port",
    "mesh_param": "pass process_group=mesh.get_group(...), of the data-parallel dimension",
    "mpu": "pass process_group=mpu.get_data_parallel_group()",
}
"""What to do instead of passing an argument of DeepSpeed's."""
