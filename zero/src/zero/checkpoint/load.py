"""Loading into an engine of any world size, stage and device: each rank reads what it owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelz.flat_buffer import HOST
from zero.checkpoint import random_state, user_state
from zero.checkpoint.dtypes import TORCH
from zero.checkpoint.engine_state import EngineParts, kind_of, stride_of
from zero.checkpoint.manifest import Manifest, ParameterEntry, TensorEntry, model_key, state_key
from zero.checkpoint.names import Rename, Target, match, raise_for
from zero.checkpoint.problems import error_of, problem_of
from zero.checkpoint.rank_file import bytes_of
from zero.checkpoint.reader import Checkpoint, find
from zero.checkpoint.storage import Storage
from zero.checkpoint.stream import CHUNK
from zero.errors import CheckpointError, StateError
from zero.flat_group import FlatGroup
from zero.optimizer import OwnedPiece
from zero.optimizer_state import in_memory_order


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
        self._entries = {entry.name: entry for entry in checkpoint.manifest.parameters}
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
            self._check_optimizer()
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
            for unit in self._engine.units:
                for group in unit.groups:
                    self._fill_optimizer(group)
            self._restore_options()

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

    def _check_optimizer(self) -> None:
        optimizer, saved = self._engine.shards.optimizer, self._manifest.optimizer
        if kind_of(optimizer) != saved.kind:
            raise StateError(
                f"the checkpoint's optimizer is {saved.kind} and this one {kind_of(optimizer)}; "
                "weights_only=True loads the weights alone"
            )
        if len(saved.param_groups) != len(optimizer.param_groups):
            raise StateError(
                f"the checkpoint's optimizer has {len(saved.param_groups)} param_groups and this one "
                f"{len(optimizer.param_groups)}; weights_only=True loads the weights alone"
            )
        problems: dict[str, list[str]] = {"without optimizer state": [], "with other optimizer state": []}
        for group, owned in self._engine.shards.owned.items():
            for piece in owned.pieces:
                spec = group.layout.specs[piece.piece.index]
                entry = self._with_state(spec.name)
                if entry is None:
                    if self._options.strict:
                        problems["without optimizer state"].append(spec.name)
                elif not self._state_fits(entry, piece, spec.numel, owned.flat is not None):
                    problems["with other optimizer state"].append(f"{spec.name} ({', '.join(entry.state)})")
        raise_for(problems)

    def _state_fits(self, entry: ParameterEntry, piece: OwnedPiece, numel: int, kernel: bool) -> bool:
        if kernel:
            mine = set(self._engine.shards.optimizer.state[piece.parameter])
            return not entry.state or set(entry.state) == mine
        tensors = {key: self._manifest.tensors[state_key(key, entry.name)] for key in entry.state}
        return piece.piece.length == numel or all(
            not tensor.shape or self._sharded(key, entry, tensor) for key, tensor in tensors.items()
        )

    def _fill_optimizer(self, group: FlatGroup) -> None:
        owned = self._engine.shards.owned.get(group)
        for piece in owned.pieces if owned else ():
            spec = group.layout.specs[piece.piece.index]
            entry = self._with_state(spec.name)
            if entry is None:
                continue
            state = self._engine.shards.optimizer.state[piece.parameter]
            if owned and owned.flat is None:
                state.clear()  # what the checkpoint does not have was not there yet
            elif not entry.state:  # never stepped: a kernel's state is zero then
                for value in state.values():
                    value.zero_()
            for key in entry.state:
                self._fill_state(state, key, entry, piece, stride_of(spec))
            state.update({key: self._values.decode(value) for key, value in entry.values.items()})
            if "step" in state:
                piece.history = hash(float(state["step"]))

    def _fill_state(
        self,
        state: dict[str, Any],
        key: str,
        entry: ParameterEntry,
        piece: OwnedPiece,
        stride: tuple[int, ...] | None,
    ) -> None:
        name, parameter = state_key(key, entry.name), piece.parameter
        tensor = self._manifest.tensors[name]
        if self._sharded(key, entry, tensor):
            if key not in state:
                state[key] = torch.empty_like(parameter.detach(), dtype=TORCH[tensor.dtype])
            self._values.fill(name, in_memory_order(state[key], parameter), piece.piece.start, stride)
        elif key in state:
            state[key].copy_(self._values.whole(name))
        else:
            options = self._engine.shards.optimizer.param_groups[piece.param_group]
            host = key == "step" and not (options.get("capturable") or options.get("fused"))
            state[key] = self._values.whole(name).to(HOST if host else parameter.device)

    def _sharded(self, key: str, entry: ParameterEntry, tensor: TensorEntry) -> bool:
        """Whether a state tensor has one value per element of its parameter."""
        return key != "step" and tensor.shape == self._manifest.tensors[model_key(entry.name)].shape

    def _restore_options(self) -> None:
        """The param_groups' options, such as learning rates, and the generators."""
        groups = self._engine.shards.optimizer.param_groups
        for group, saved in zip(groups, self._manifest.optimizer.param_groups, strict=True):
            for name, value in self._values.decode(saved).items():
                if isinstance(group.get(name), Tensor):
                    group[name].copy_(value if isinstance(value, Tensor) else torch.tensor(value))
                else:
                    group[name] = value
        if self._engine.rank < self._manifest.world_size:
            rng = self._manifest.ranks[self._engine.rank].rng
            random_state.restore(self._engine.accelerator, self._values.decode(rng))

    def _with_state(self, name: str) -> ParameterEntry | None:
        """The parameter in the checkpoint, if its optimizer knew it there."""
        entry = self._entries.get(self._sources.get(name, ""))
        return entry if entry is not None and entry.trainable and entry.group is not None else None


class Values:
    """Tensors of a checkpoint into tensors of an engine, a bounded piece at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._buffer: Tensor | None = None

    def fill(self, key: str, target: Tensor, start: int, stride: tuple[int, ...] | None) -> None:
        """Write a tensor's elements from `start` on into `target`, cast to its dtype.

        target: one-dimensional, in the memory order that `stride` (None: row-major) means.
        """
        entry = self._checkpoint.tensor(key)
        if entry.stride != stride:
            target.copy_(_reordered(self.whole(key), stride)[start : start + target.numel()])
            return
        dtype, step = TORCH[entry.dtype], CHUNK // entry.item_bytes
        if self._buffer is None:
            self._buffer = torch.empty(CHUNK, dtype=torch.uint8)
        for first in range(0, target.numel(), step):
            part = target[first : first + step]
            staged = self._buffer[: part.numel() * entry.item_bytes]
            self._checkpoint.read(key, start + first, bytes_of(staged))
            part.copy_(staged.view(dtype))

    def whole(self, key: str) -> Tensor:
        """A whole tensor, on the host, in its shape."""
        entry = self._checkpoint.tensor(key)
        flat = torch.empty(entry.numel, dtype=TORCH[entry.dtype])
        self._checkpoint.read(key, 0, bytes_of(flat))
        return flat.view(entry.shape) if entry.stride is None else flat.as_strided(entry.shape, entry.stride)

    def decode(self, value: Any) -> Any:
        """User state, with its tensors."""
        return user_state.decode(value, self.whole)


def _reordered(values: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """A tensor's elements in the memory order that `stride` means."""
    if stride is None:
        return values.contiguous().view(-1)
    other = torch.empty_strided(values.shape, stride, dtype=values.dtype).copy_(values)
    return other.as_strided((values.numel(),), (1,))


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
