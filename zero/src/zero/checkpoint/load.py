"""Loading into an engine of any world size, stage and device: each rank reads what it owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero.checkpoint import random_state
from zero.checkpoint.engine_state import EngineParts, stride_of
from zero.checkpoint.load_optimizer import OptimizerLoad
from zero.checkpoint.manifest import Manifest, model_key
from zero.checkpoint.names import Rename, Target, match, raise_for
from zero.checkpoint.problems import error_of, problem_of
from zero.checkpoint.reader import Checkpoint, find
from zero.checkpoint.storage import Storage
from zero.checkpoint.values import Values
from zero.errors import CheckpointError, StateError
from zero.flat_group import FlatGroup


@dataclass(frozen=True)
class Options:
    """See Engine.load_checkpoint."""

    restore: Mapping[str, Any]
    strict: bool
    weights_only: bool
    rename: Rename | None


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint held besides the engine's own state.

    path: the checkpoint's directory. steps: optimizer steps when it was saved. world_size: ranks that saved
    it. state: as given to save_checkpoint, tensors on the host. rank_states: those of all ranks that saved.
    """

    path: Path
    steps: int
    world_size: int
    state: dict[str, Any]
    rank_states: tuple[dict[str, Any], ...]


def load(
    engine: EngineParts, storage: Storage, path: Path, options: Options, before_change: Callable[[], None]
) -> Loaded:
    """Collective. before_change: called when everything has been checked and values begin to change."""
    together = _Together(engine)
    where = together(lambda: str(find(path, storage)) if engine.rank == 0 else None)[0]
    opened: list[Checkpoint] = []
    try:
        digests = together(lambda: _open(engine, storage, Path(where), opened))
        if len(set(digests)) > 1:
            raise CheckpointError(
                f"the ranks see different files in {where}: it was replaced, or is not shared"
            )
        load = _Load(engine, opened[0], options)
        together(load.check)
        before_change()
        together(load.fill)
        load.spread()
        return load.finish()
    finally:
        for checkpoint in opened:
            checkpoint.close()


class _Together:
    """Runs something on every rank; if it fails on one, it raises on all."""

    def __init__(self, engine: EngineParts) -> None:
        self._communicator = engine.communicator
        self._rank = engine.rank

    def __call__(self, action: Callable[[], Any]) -> list[Any]:
        """Every rank's result, JSON values, by rank."""
        cause: Exception | None = None
        try:
            mine = {"value": action()}
        except Exception as error:
            cause = error
            mine = {"problem": problem_of(error, f"rank {self._rank} could not load the checkpoint")}
        results = self._communicator.share_all(mine)
        for result in results:
            if "problem" in result:
                raise error_of(result["problem"]) from cause
        return [result["value"] for result in results]


def _open(engine: EngineParts, storage: Storage, path: Path, opened: list[Checkpoint]) -> int:
    checkpoint = Checkpoint(path, storage)
    opened.append(checkpoint)
    if engine.rank == 0:
        checkpoint.check_files()
    return checkpoint.digest


class _Load:
    """One load, in the order of its methods."""

    def __init__(self, engine: EngineParts, checkpoint: Checkpoint, options: Options) -> None:
        self._engine = engine
        self._checkpoint = checkpoint
        self._manifest: Manifest = checkpoint.manifest
        self._options = options
        self._values = Values(checkpoint)
        self._sources: dict[str, str] = {}
        self._extra_state = {
            name
            for name, value in engine.module.state_dict(keep_vars=True).items()
            if not isinstance(value, Tensor)
        }
        self._state: dict[str, Any] = {}
        self._rank_states: tuple[dict[str, Any], ...] = ()

    def check(self) -> None:
        """Raise StateError or UsageError for whatever does not fit. Changes nothing."""
        options = self._options
        self._sources = match(self._manifest, _targets(self._engine), options.rename, options.strict)
        if options.strict:
            mine, saved = self._extra_state, self._manifest.extra_state.keys()
            raise_for({"extra state missing": [*mine - saved], "extra state unexpected": [*saved - mine]})
        if not options.weights_only:
            self._optimizer().check(options.strict)
        lost = [name for name in options.restore if name not in self._manifest.state]
        if lost:
            raise StateError(
                f"restore: the checkpoint's state has no {lost}; it has {list(self._manifest.state)}"
            )

    def fill(self) -> None:
        """This rank's shards, masters, optimizer state and generators; the module's buffers."""
        for unit in self._engine.units:
            for group in unit.groups:
                self._fill_group(group)
        self._fill_buffers()
        decode = self._values.decode
        self._state = decode(self._manifest.state)
        self._rank_states = tuple(decode(rank.state) for rank in self._manifest.ranks)
        if not self._options.weights_only:
            self._optimizer().fill()
            self._restore_random_state()

    def spread(self) -> None:
        """Refresh whole parameters that are kept. Collective."""
        resident = [unit for unit in self._engine.units if unit.resident]
        handles = [
            group.start_gather(self._engine.communicator, None)
            for unit in resident
            for group in unit.groups
            if group.shards > 1
        ]
        for handle in handles:
            handle.wait()

    def finish(self) -> Loaded:
        """Loss scale and the caller's objects."""
        scale, saved = self._engine.loss_scale, self._manifest.loss_scale
        if scale is not None and saved is not None and not self._options.weights_only:
            scale.scale.fill_(saved.scale)
            scale.good_steps.fill_(saved.good_steps)
        for name, value in self._options.restore.items():
            value.load_state_dict(self._state[name])
        manifest = self._manifest
        return Loaded(
            self._checkpoint.path, manifest.steps, manifest.world_size, self._state, self._rank_states
        )

    def _optimizer(self) -> OptimizerLoad:
        return OptimizerLoad(self._engine, self._manifest, self._values, self._sources)

    def _restore_random_state(self) -> None:
        if self._engine.rank < self._manifest.world_size:
            rng = self._manifest.ranks[self._engine.rank].rng
            random_state.restore(self._engine.accelerator, self._values.decode(rng))

    def _fill_group(self, group: FlatGroup) -> None:
        wide = group.shard if group.master is None else group.master
        for piece in group.pieces:
            spec = group.layout.specs[piece.index]
            source = self._sources.get(spec.name)
            if source is None:
                continue
            target = wide[piece.shard_slice]
            self._values.fill(model_key(source), target, piece.start, stride_of(spec))
            if wide is not group.shard:
                group.shard[piece.shard_slice].copy_(target)

    @torch.no_grad()
    def _fill_buffers(self) -> None:
        for name, buffer in _buffers(self._engine.module).items():
            if name in self._sources:
                values = self._values.whole(model_key(self._sources[name]))
                buffer.copy_(values)
        for name in self._extra_state & self._manifest.extra_state.keys():
            module, _, _ = name.rpartition(".")
            value = self._values.decode(self._manifest.extra_state[name])
            self._engine.module.get_submodule(module).set_extra_state(value)


def _targets(engine: EngineParts) -> list[Target]:
    aliases: dict[str, list[str]] = {}
    for name, first in engine.aliases.items():
        aliases.setdefault(first, []).append(name)
    parameters = [
        Target(spec.name, spec.shape, group.dtype.is_floating_point, tuple(aliases.get(spec.name, ())))
        for unit in engine.units
        for group in unit.groups
        for spec in group.layout.specs
    ]
    buffers = _buffers(engine.module)
    return parameters + [
        Target(n, tuple(b.shape), b.is_floating_point() or b.is_complex()) for n, b in buffers.items()
    ]


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Tensors in the module's state dict that are no parameters."""
    return {
        name: value
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    }
