"""The optimizer's whole state by parameter name, put together from the shards. Collective.

Of a slice, a state tensor is either element-wise (exp_avg: one value per element, sharded like the parameter)
or a scalar (step: the same on every rank that owns a part); moments in 8 bits also have codes, one per
element, and scales, one for each block of a parameter. Of a whole parameter, a state tensor may have any
shape, and the rank that steps the parameter has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from accelz import Group
from accelz.dynamic_map import BLOCK
from zero.files.dtypes import TORCH, name_of
from zero.optimizer.piece_state import in_memory_order, inner_tensors, is_elementwise, is_wrapper
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.optimizer.stepped import SteppedPiece
from zero.sharding.distributed import block_of
from zero.sharding.flat_group import FlatGroup
from zero.sharding.sharded_unit import ShardedUnit
from zero.tiers.coded import Coded
from zero.tiers.values import Stored, Values
from zero.whole.full_parameters import FullParameters, view_of

Kind = Literal["elements", "blocks", "scalar"]
CODES, SCALES = ".codes", ".scales"
"""What of moments in 8 bits stands beside their values."""


class OptimizerState:
    """Whole optimizer state over all trainable groups."""

    def __init__(self, full_parameters: FullParameters, optimizer: ShardedOptimizer) -> None:
        self._full_parameters = full_parameters
        self._subs_of = optimizer.subs_of
        self._state = optimizer.optimizer.state

    def of(self, name: str) -> dict[str, Tensor]:
        """The state of one parameter, whole, on every rank's device."""
        unit, group, index = self._full_parameters.locate(name)
        if group not in self._subs_of or not self._subs_of[group][0].specs[index].numel:
            return {}
        with self._full_parameters.communicator.together(), group.room_for_whole(torch.float32):
            if self._is_whole(group):
                return self._of_parameter(unit, group, index)
            return {
                key: _entry(self._gather(unit, group, key, kind, TORCH[dtype]), group, index, kind).clone()
                for key, (kind, dtype) in self._keys(group, index).items()
            }

    def _pieces(self, group: FlatGroup, index: int) -> Iterator[SteppedPiece]:
        found = (piece for stepped in self._subs_of[group] for piece in stepped.pieces)
        return (piece for piece in found if piece.piece.index == index)

    def _is_whole(self, group: FlatGroup) -> bool:
        """Whether the user's optimizer steps whole parameters of a group."""
        first = self._subs_of[group][0]
        return first.rule is None and (first.routes is not None or group.shards == 1)

    def _of_parameter(self, unit: ShardedUnit, group: FlatGroup, index: int) -> dict[str, Tensor]:
        """The state on the rank that steps a parameter; where all ranks step it, each has its own."""
        communicator = self._full_parameters.communicator
        pieces = self._pieces(group, index)
        state: dict[str, Any] = next((self._state.get(piece.parameter, {}) for piece in pieces), {})
        mine = {key: value for name, kept in state.items() for key, value in _tensors(name, kept)}
        mine |= _from_codes(state)
        ranks, source, forms = self._source(
            group, {key: [list(value.shape), name_of(value.dtype, key)] for key, value in mine.items()}
        )
        found = {}
        for key, (shape, dtype) in forms.items():
            value = torch.zeros(shape, dtype=TORCH[dtype], device=group.home.data.device)
            if key in mine:
                value.copy_(mine[key])
            if ranks is not None:
                communicator.broadcast(unit.name, value.view(-1).view(torch.uint8), source, ranks)
            found[key] = self._block(group, index, value)
        return found

    def _source(self, group: FlatGroup, mine: dict[str, Any]) -> tuple[Group | None, int, dict[str, Any]]:
        """Which ranks one of them gives a parameter's state to, its number there, and what it has; None where
        all have it. mine: what this one has."""
        communicator, stepped = self._full_parameters.communicator, self._subs_of[group][0]
        if stepped.joins_blocks:
            told = communicator.all_gather_alike([stepped.ranks.rank, mine])  # several may have it: copies
            source, forms = max(told, key=lambda each: len(each[1]))
            return stepped.ranks, source, forms
        every, members = communicator.all_gather_object(mine), group.mesh.members
        source = max(range(len(members)), key=lambda rank: len(every[members[rank]]))
        return group.mesh.data if group.shards > 1 else None, source, every[members[source]]

    def _block(self, group: FlatGroup, index: int, value: Tensor) -> Tensor:
        """Of a value for each element, those of this rank's block."""
        parameter = group.parameters[index]
        joins_blocks = self._subs_of[group][0].joins_blocks and value.shape == parameter.shape
        return block_of(parameter, value).clone() if joins_blocks else value

    def _keys(self, group: FlatGroup, index: int) -> dict[str, tuple[Kind, str]]:
        """The state tensors of a parameter with the names of their dtypes, agreed on by the ranks, since one
        may own no piece. Single numbers have fp32."""
        mine: dict[str, tuple[Kind, str]] = {}
        for piece in self._pieces(group, index):
            for key, value in self._state.get(piece.parameter, {}).items():
                if isinstance(value, (Tensor, Stored)):
                    if is_elementwise(key, value, piece.parameter):
                        mine[key] = "elements", name_of(value.dtype, key)
                    if isinstance(value, Coded):
                        mine |= {key + CODES: ("elements", "U8"), key + SCALES: ("blocks", "F32")}
                    mine.setdefault(key, ("scalar", "F32"))
        merged: dict[str, tuple[Kind, str]] = {}
        for theirs in self._full_parameters.communicator.all_gather_object(mine):
            for key, (kind, dtype) in theirs.items():
                if kind != "scalar" or key not in merged:
                    merged[key] = kind, dtype
        return dict(sorted(merged.items()))

    def _gather(
        self, unit: ShardedUnit, group: FlatGroup, key: str, kind: Kind, dtype: torch.dtype
    ) -> Tensor:
        """One state tensor of a whole group: flat in buffer order, by element or by block, or one number per
        parameter."""
        every = BLOCK if kind == "blocks" else 1
        numel = len(group.names) if kind == "scalar" else group.layout.shard_numel // every
        flat = torch.zeros(numel, dtype=dtype, device=group.home.data.device)
        for stepped in self._subs_of[group]:
            for piece in stepped.pieces:
                state = self._state.get(piece.parameter, {})
                value: Any = _beside(state, key) if key not in state else state[key]
                if value is not None and kind != "scalar":
                    first = (stepped.sub.window.start + piece.piece.shard_start) // every
                    with self._full_parameters.communicator.postponing_disk_errors():
                        own = in_memory_order(value, piece.parameter) if key in state else value
                        flat[first : first + own.numel()].copy_(own.to(flat.device))
                elif value is not None:
                    flat[piece.piece.index] = value
        if kind != "scalar":
            return self._full_parameters.gather(unit, group, flat)
        if group.shards > 1:
            ranks = group.mesh.shards
            self._full_parameters.communicator.all_reduce(unit.name, flat, ranks, "max").wait()
        return flat


def _beside(state: Mapping[str, Any], key: str) -> Values | None:
    """The codes or scales of a moment in 8 bits."""
    moment = state.get(key.removesuffix(CODES).removesuffix(SCALES))
    if not isinstance(moment, Coded):
        return None
    return moment.codes if key.endswith(CODES) else moment.scales


def _tensors(key: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a value of a state: of a wrapper, what it stands for, and what it wraps."""
    if is_wrapper(value):
        if (
            type(value).dequantize is not Tensor.dequantize
        ):  # its own: a plain tensor's takes only torch's types
            yield key, value.dequantize()
        yield from ((f"{key}.{name}", inner) for name, inner in inner_tensors(value).items())
    elif isinstance(value, Tensor):
        yield key, value


def _from_codes(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """What bitsandbytes' 8-bit state stands for: each code's place in a map, by its block's largest value."""
    found = {}
    for number in "12":
        codes, scales, values = (state.get(f"{name}{number}") for name in ("state", "absmax", "qmap"))
        if isinstance(codes, Tensor) and isinstance(scales, Tensor) and isinstance(values, Tensor):
            block = next((n for n in _BLOCKS if -(-codes.numel() // n) == scales.numel()), None)
            if block is not None:
                each = scales.repeat_interleave(block)[: codes.numel()].view(codes.shape)
                found[f"state{number}.dequantised"] = values[codes.int()] * each
    return found


_BLOCKS = (256, 2048)  # elements, of bitsandbytes' present and earlier versions


def _entry(flat: Tensor, group: FlatGroup, index: int, kind: Kind) -> Tensor:
    if kind == "blocks":
        slot = group.layout.slots[index]
        first = slot.offset // BLOCK
        return flat[first : first - (-slot.numel // BLOCK)]
    return view_of(flat, group, index) if kind == "elements" else flat[index]
