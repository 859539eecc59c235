"""An engine's state as stretches of tensors: those that this rank writes.

Each rank writes its own shards of sharded groups. Of a replicated group (stage 0) it writes a slice, cut as
if the group were sharded. Module buffers, and optimizer state that is not one value per element (Adam's
`step`), are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from accelz import HOST, Accelerator
from zero.checkpoint import random_state, user_state
from zero.checkpoint.rank_file import Part
from zero.checkpoint.storable import check_storable, told
from zero.checkpoint.stored_names import StoredNames
from zero.communication.communicator import Communicator
from zero.communication.mesh import Meshes
from zero.config.training import Config
from zero.errors import UsageError
from zero.files.dtypes import name_of
from zero.files.manifest import model_key, state_key
from zero.gradients.loss_scale import LossScale
from zero.loading.weights import stride_of
from zero.optimizer.joint import kind_of, kinds_of_groups
from zero.optimizer.piece_state import described, in_memory_order, is_elementwise, is_wrapper
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.optimizer.state_offload import StateOffload
from zero.optimizer.stepped import SteppedPiece
from zero.sharding import layout
from zero.sharding.distributed import region_of
from zero.sharding.flat_group import FlatGroup
from zero.sharding.forms import descriptions
from zero.sharding.layout import ParameterSpec, Piece
from zero.sharding.sharded_unit import ShardedUnit
from zero.sharding.state_entries import Selection, entries_of
from zero.tiers.values import Stored, Values, at_least_fp32, joined
from zero.warning import warn


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine that a checkpoint is made from and loaded into.

    param_group_of: for each parameter, the index of its group in the optimizer's param_groups. state_offload:
    tells whether the state is on the host at the moment.
    """

    module: nn.Module
    config: Config
    accelerator: Accelerator
    communicator: Communicator
    meshes: Meshes
    units: tuple[ShardedUnit, ...]
    sharded_optimizer: ShardedOptimizer
    param_group_of: dict[nn.Parameter, int]
    loss_scale: LossScale | None
    state_offload: StateOffload

    @property
    def rank(self) -> int:
        """This rank's number in the job."""
        return self.communicator.whole.rank

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""
        return self.communicator.whole.size

    def stored_names(self) -> StoredNames:
        """Collective; see `StoredNames`."""
        return StoredNames(self.module, self.units, self.communicator, self.meshes)


@dataclass
class RankState:
    """This rank's share of the state.

    described: what the manifest says of it that no other rank does. parts: stretches of tensors. values:
    optimizer state that is not a tensor, by parameter and key, as JSON values. rng, state: the random state
    and the caller's rank_state, encoded as user state.
    """

    described: dict[str, Any] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    rng: Any = None
    state: Any = None


def chosen_of(engine: EngineParts, selection: Selection) -> set[str]:
    """The names of the parameters, buffers and extra state to save."""
    groups = [group for unit in engine.units for group in unit.groups if group.trainable]
    return selection.chosen(entries_of(engine.module), {p for group in groups for p in group.parameters})


def collect(engine: EngineParts, rank_state: Any, chosen: Container[str], names: StoredNames) -> RankState:
    """Everything this rank writes, except what only rank 0 does. The tensors are the engine's, not copies.

    chosen: see `chosen_of`.
    """
    found = RankState()
    for unit in engine.units:
        for group in unit.groups:
            if group.mesh.is_first_copy:  # the others have the same values
                _collect_group(engine, group, found, chosen, names)
    found.described = _describe_own(engine, found.parts, chosen, names)
    prefix = f"rank/{engine.rank}"
    found.rng = user_state.encode(
        random_state.read(engine.accelerator), f"{prefix}/rng", found.parts, "the random state"
    )
    found.state = user_state.encode(rank_state, f"{prefix}/state", found.parts, "rank_state")
    return found


def describe(engine: EngineParts, parts: list[Part]) -> dict[str, Any]:
    """The manifest's members that rank 0 knows; tensors that only rank 0 writes are added to `parts`."""
    return {
        "world_size": engine.world_size,
        "stage": engine.config.stage,
        "precision": engine.config.precision,
        "loss_scale": engine.loss_scale and _loss_scale(engine.loss_scale),
        "optimizer": {
            "kind": kind_of(engine.sharded_optimizer.optimizer),
            "of_groups": kinds_of_groups(engine.sharded_optimizer.optimizer),
            "param_groups": [
                dict(_options(group, f"group/{index}", parts))
                for index, group in enumerate(engine.sharded_optimizer.optimizer.param_groups)
            ],
        },
    }


def _describe_own(
    engine: EngineParts, parts: list[Part], chosen: Container[str], names: StoredNames
) -> dict[str, Any]:
    """The manifest's members of which this rank describes what it is the first to have; tensors that only it
    writes are added to `parts`."""
    entries, forms, stored = entries_of(engine.module), descriptions(engine.module), names.stored
    parameters = [several[0] for several in entries.parameters.values()]
    groups = [group for unit in engine.units for group in unit.groups]
    parts.extend(part for group in groups for part in _empty_parameters(group, chosen, names))
    buffers = {stored(n): b for n, b in entries.buffers.items() if n in chosen and names.is_first(n)}
    parts.extend(Part.whole(model_key(name), buffer) for name, buffer in buffers.items())
    return {
        "parameters": [
            {
                "name": stored(name),
                "dtype": name_of(group.dtype, name),
                "trainable": group.trainable,
                "unit": group.unit,
                "group": engine.param_group_of.get(parameter),
                "aliases": [stored(alias) for alias in entries.parameters.get(parameter, (name,))[1:]],
                **_described_block(parameter, names.block(name), forms.get(parameter)),
            }
            for group in groups
            for name, parameter in zip(group.names, group.parameters, strict=True)
            if name in chosen and names.is_first(name)
        ],
        "left_out": [
            stored(n)
            for n in (*parameters, *entries.buffers, *entries.rest)
            if n not in chosen and names.is_first(n)
        ],
        "buffers": list(buffers),
        "extra_state": {
            stored(name): user_state.encode(value, f"extra/{stored(name)}", parts, f"the module's {name!r}")
            for name, value in entries.rest.items()
            if name in chosen and names.is_first(name)
        },
    }


def _described_block(parameter: nn.Parameter, at: str, form: str | None) -> dict[str, Any]:
    """What the manifest says of a parameter that is divided. at: see `StoredNames.block`; "" if this is no
    block, or the other blocks are saved elsewhere."""
    region = region_of(parameter)
    if region is None:
        return {"form": form}
    blocks = [{"at": at, "runs": region.runs}] if at else []
    return {"form": None if at else form, "shape": tuple(parameter.shape), "blocks": blocks}


def check_state(engine: EngineParts) -> None:
    """Raise StateError for optimizer state of this rank that a checkpoint cannot hold.

    Of optimizers that step themselves, as only they choose what their state is.
    """
    optimizer = engine.sharded_optimizer
    for stepped in (stepped for stepped in optimizer.subs if stepped.rule is None):
        for piece in stepped.pieces:
            spec = stepped.specs[piece.piece.index]
            whole = stepped.group.parameters[piece.piece.index].numel()
            for name, value in optimizer.optimizer.state.get(piece.parameter, {}).items():
                check_storable(name, value, spec.name, piece.parameter, piece.piece.length < whole)


def average_parts(
    averages: Mapping[FlatGroup, Tensor],
    key_of: Callable[[str], str],
    chosen: Container[str],
    names: StoredNames,
) -> Iterator[Part]:
    """This rank's slices of an average. key_of: the key of a parameter by its stored name."""
    for group, flat in averages.items():
        if group.mesh.is_first_copy:
            yield from _slices(group, flat, key_of, chosen, names)


def _slices(
    group: FlatGroup, flat: Values, key_of: Callable[[str], str], chosen: Container[str], names: StoredNames
) -> Iterator[Part]:
    """What this rank writes of a group's parameters. flat: its values."""
    for piece in _written_by(group):
        spec, values = group.layout.specs[piece.index], flat[piece.shard_slice]
        if spec.name in chosen:
            key = key_of(names.stored(spec.name)) + names.block(spec.name)
            yield Part(key, spec.shape, values, piece.start, stride_of(spec))


def _collect_group(
    engine: EngineParts, group: FlatGroup, found: RankState, chosen: Container[str], names: StoredNames
) -> None:
    found.parts += _slices(group, group.widest, model_key, chosen, names)
    written = {p.index: slice(p.start, p.start + p.length) for p in _written_by(group)}
    pieces: dict[int, list[SteppedPiece]] = {}
    subs = engine.sharded_optimizer.subs_of.get(group, ())
    joins_blocks = any(stepped.joins_blocks for stepped in subs)
    for stepped in subs:
        for mine in (piece for piece in stepped.pieces if stepped.name_of(piece) in chosen):
            pieces.setdefault(mine.piece.index, []).append(mine)
    for index, of_parameter in pieces.items():
        first, last = of_parameter[0].piece, of_parameter[-1].piece
        window: slice | None = slice(first.start, last.start + last.length)
        if group.shards == 1 and joins_blocks:
            window = window if group.mesh.shards.rank == 0 else None
        elif group.shards == 1:  # every rank has all of the state; it writes what it writes of the values
            window = written.get(index)
        if window is not None:
            spec = subs[0].specs[index]
            whole = group.parameters[index].numel()
            block = "" if joins_blocks else names.block(spec.name)
            is_first = window.start == 0 and (joins_blocks or names.has_first_block(spec.name))
            stored = names.stored(spec.name)
            _collect_state(engine, spec, of_parameter, window, found, (stored, block), is_first, whole)


def _written_by(group: FlatGroup) -> Sequence[Piece]:
    """What this rank writes of a group's parameters: the pieces of its shard.

    Of a replicated group, the pieces that the rank's shard would have, at their places in the whole buffer.
    """
    rank, ranks = group.mesh.shards.rank, group.mesh.shards.size
    if group.shards == ranks:
        return group.pieces
    cut = layout.plan(group.layout.specs, ranks, group.dtype.itemsize)
    offsets = [slot.offset for slot in group.layout.slots]
    return [Piece(p.index, p.start, offsets[p.index] + p.start, p.length) for p in cut.pieces(rank)]


def _collect_state(
    engine: EngineParts,
    spec: ParameterSpec,
    pieces: Sequence[SteppedPiece],
    window: slice,
    found: RankState,
    name: tuple[str, str],
    is_first: bool,
    whole: int,
) -> None:
    """Collect a parameter's optimizer state for the elements in `window`.

    pieces: the parameter's, in order. name: its stored one, and what follows it where the pieces are of a
    block. is_first: whether its first element is in the window, with which state is written that is not
    element-wise, and so the same for all of them. whole: how many elements it has, with the blocks of other
    ranks.
    """
    stored, block = name
    state, first = engine.sharded_optimizer.optimizer.state, pieces[0]
    for kept, value in state.get(first.parameter, {}).items():
        check_storable(kept, value, spec.name, first.parameter, first.piece.length < whole)
        key = state_key(kept, stored)
        if isinstance(value, (Tensor, Stored)) and is_elementwise(kept, value, first.parameter):
            flat = joined([in_memory_order(state[p.parameter][kept], p.parameter) for p in pieces])
            values = flat[window.start - first.piece.start : window.stop - first.piece.start]
            found.parts.append(Part(key + block, spec.shape, values, window.start, stride_of(spec)))
        elif isinstance(value, Tensor) and not is_wrapper(value):
            if is_first:
                found.parts.append(Part.whole(key, value))
        elif is_first:
            what = told(kept, spec.name)
            plain = described(value, what) if is_wrapper(value) else value
            found.values.setdefault(stored, {})[kept] = user_state.encode(plain, key, found.parts, what)


def _empty_parameters(group: FlatGroup, chosen: Container[str], names: StoredNames) -> Iterator[Part]:
    nothing = group.shard[:0]
    if group.trainable:  # in the dtype of masters, which other blocks have
        nothing = torch.empty(0, dtype=at_least_fp32(group.dtype), device=HOST)
    for spec in group.layout.specs:
        if not spec.numel and spec.name in chosen and names.is_first(spec.name):
            key = model_key(names.stored(spec.name) + names.block(spec.name))
            yield Part(key, spec.shape, nothing)


def _loss_scale(scale: LossScale) -> dict[str, float | int]:
    return {
        "scale": scale.scale.item(),
        "good_steps": scale.good_steps.item(),
        "skipped_steps": int(scale.skipped),
    }


def _options(group: dict[str, Any], prefix: str, parts: list[Part]) -> Iterator[tuple[str, Any]]:
    """A param group's options that a file can hold.

    Functions are skipped silently, as they belong to the program; other options that cannot be stored are
    skipped with a warning.
    """
    for name, value in group.items():
        if name == "params" or callable(value):
            continue
        tensors: list[Part] = []
        try:
            encoded = user_state.encode(value, f"{prefix}/{name}", tensors, f"the optimizer's {name!r}")
        except UsageError as error:
            warn(f"left out of the checkpoint: {error}")  # on rank 0, which describes what all save
            continue
        parts.extend(tensors)
        yield name, encoded
