"""Load parameters from safetensors files, each rank reading its slices.

Before `zero.initialize`, a parameter that was made under `zero.init()` is only *promised* its values: the
engine's units are built with uninitialised memory, and this rank's slices are then read into its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from zero.communication.communicator import Communicator
from zero.config.paths import as_path
from zero.deferred import deferred_init
from zero.errors import CheckpointError, ModelError, UsageError
from zero.files.boundary import typed
from zero.files.names import Rename, match
from zero.files.safetensors_header import is_safetensors
from zero.files.safetensors_weights import SafetensorsWeights
from zero.files.storage import DISK, Storage
from zero.loading.tensor_reader import TensorReader
from zero.loading.together import all_or_none
from zero.loading.weights import fill_buffers, fill_units, targets
from zero.sharding.distributed import local_of, region_of
from zero.sharding.guard import has_engine
from zero.sharding.sharded_unit import ShardedUnit, refill
from zero.sharding.state_entries import entries_of

if TYPE_CHECKING:
    from zero.whole.full_parameters import FullParameters


@dataclass(frozen=True)
class Request:
    """The arguments of load_pretrained(). storage: the file system; tests replace it."""

    path: Path
    strict: bool = True
    rename: Rename | None = None
    storage: Storage = DISK

    def open(self) -> SafetensorsWeights:
        """Return the weights; their files are opened when they are read."""
        with typed(self.path):
            if is_safetensors(self.path):
                return SafetensorsWeights(self.path, self.storage)
        raise CheckpointError(
            f"{self.path} is neither a safetensors file nor a directory with model.safetensors or an "
            "index; `zero consolidate` makes such weights from checkpoints and torch.save files"
        )

    def match(self, weights: SafetensorsWeights, model: nn.Module) -> dict[str, str]:
        """Map names in the model to names of the tensors that fill them."""
        return match(weights.stored, targets(model), self.rename, self.strict, TensorReader(weights).same)


@dataclass(frozen=True)
class Promise:
    """Where a deferred parameter's values will come from. key: the tensor's name in `weights`."""

    weights: SafetensorsWeights
    key: str

    def __str__(self) -> str:  # the same on every rank, wherever its files are
        return f"pretrained {self.key}"


def load_pretrained(
    model: nn.Module, path: str | Path, *, strict: bool = True, rename: Rename | None = None
) -> None:
    """Fill a model's parameters and buffers from safetensors, before `zero.initialize`.

        with zero.init(): model = BigModel()
        zero.load_pretrained(model, "weights/")

    Parameters made under `zero.init()` are filled by `zero.initialize`, each rank reading its slices, so that
    no rank holds more than its shards and one unit. Other parameters are filled whole, immediately. Values
    are cast to the parameter's dtype; fp32 masters are filled from the file's values, not from their 16-bit
    rounding. Of a DTensor each rank reads its own block.

    path: a safetensors file, or a directory with model.safetensors or an index, visible to every rank.
    strict: refuse missing and unexpected names; otherwise parameters that are missing keep the constructor's
    values. rename: a mapping or function from names in the files to names in the model, None for names to
    leave out. For a model that has an engine, see Engine.load_pretrained.

    Raises, before anything changes: CheckpointError if files are missing, CorruptCheckpointError if they
    make no sense, StateError with all names that do not fit, UsageError for a sharded model.
    """
    fill(model, Request(as_path(path), strict, rename))


def fill(model: nn.Module, request: Request) -> None:
    """Do what load_pretrained() does."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if has_engine(model):
        raise UsageError("the model has an engine: call engine.load_pretrained(path) instead")
    with closing(request.open()) as weights:
        keys = request.match(weights, model)
        reader = TensorReader(weights)
        fill_buffers(model, reader, keys)
        for parameter, (name, *_) in entries_of(model).parameters.items():
            if name not in keys:
                continue
            if deferred_init.is_deferred(parameter):
                deferred_init.promise(parameter, Promise(weights, keys[name]))
            else:
                with torch.no_grad():
                    local_of(parameter).copy_(reader.whole(keys[name], region_of(parameter)))


def keep_promises(units: Sequence[ShardedUnit], communicator: Communicator) -> None:
    """Fill the shards and masters of parameters that were promised their values. Collective if there are any.

    Raises CheckpointError, on every rank, if a file can no longer be read.
    """
    keys: dict[SafetensorsWeights, dict[str, str]] = {}
    for group in (group for unit in units for group in unit.groups):
        for name, parameter in zip(group.names, group.parameters, strict=True):
            promise = deferred_init.promised(parameter)
            if promise is not None:
                keys.setdefault(promise.weights, {})[name] = promise.key
                deferred_init.forget_promise(parameter)
    if keys:
        all_or_none(communicator, "pretrained weights", lambda: _fill_shards(units, keys))
        refill(units, frozen=True)


def fill_engine(
    model: nn.Module, full: FullParameters, request: Request, before_change: Callable[[], None]
) -> None:
    """Do what Engine.load_pretrained does. before_change: called once everything has been checked."""
    opened: list[SafetensorsWeights] = []
    keys: dict[str, str] = {}

    def check() -> None:
        opened.append(request.open())
        keys.update(request.match(opened[0], model))

    def change() -> None:
        fill_buffers(model, TensorReader(opened[0]), keys)
        _fill_shards(full.units, {opened[0]: keys})

    try:
        all_or_none(full.communicator, "pretrained weights", check)
        before_change()
        all_or_none(full.communicator, "pretrained weights", change)
        refill(full.units, frozen=True)
    finally:
        for weights in opened:
            weights.close()


def _fill_shards(units: Sequence[ShardedUnit], keys: Mapping[SafetensorsWeights, Mapping[str, str]]) -> None:
    for weights, names in keys.items():
        try:
            fill_units(units, TensorReader(weights), names)
        finally:
            weights.close()
