"""The optimizer's whole state by parameter name, out of the shards and back into them. Collective.

A state tensor of a piece is either element-wise (exp_avg: one value per element, sharded like the
parameter) or a scalar (step: the same on every rank that owns a part).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from accelz.flat_buffer import HOST
from zero.errors import StateError
from zero.flat_group import FlatGroup
from zero.optimizer import OwnedGroup, OwnedPiece, ShardedOptimizer
from zero.sharded_unit import ShardedUnit
from zero.whole import WholeValues, view_of

Kind = Literal["elements", "scalar"]


class OptimizerState:
    """Whole optimizer state over all trainable groups."""

    def __init__(self, whole: WholeValues, optimizer: ShardedOptimizer) -> None:
        self._whole = whole
        self._owned = optimizer.owned
        self._state = optimizer.optimizer.state

    def read(self) -> dict[str, dict[str, Tensor]]:
        """All state by parameter name, fp32, in rank 0's host memory ({} on other ranks)."""
        result: dict[str, dict[str, Tensor]] = {}
        for unit, owned in self._groups():
            for key, kind in self._keys(owned).items():
                flat = self._gather(unit, owned, key, kind)
                if self._whole.is_source:
                    for index, name in enumerate(owned.group.names):
                        value = _entry(flat, owned.group, index, kind)
                        result.setdefault(name, {})[key] = value.to(HOST, copy=True).contiguous()
        return result

    def of(self, name: str) -> dict[str, Tensor]:
        """The state of one parameter, whole, on every rank's device."""
        unit, group, index = self._whole.locate(name)
        owned = self._owned.get(group)
        if owned is None:
            return {}
        return {
            key: _entry(self._gather(unit, owned, key, kind), group, index, kind).clone()
            for key, kind in self._keys(owned).items()
        }

    def load(self, state: Mapping[str, Mapping[str, Tensor]] | None) -> None:
        """Distribute rank 0's state by parameter name (ignored on other ranks)."""
        given = dict(state or {}) if self._whole.is_source else {}
        names: dict[str, list[str]] = self._whole.share({n: sorted(v) for n, v in given.items()})
        unknown = sorted(n for n in names if n not in self._whole)
        if unknown:
            raise StateError(f"optimizer state for parameters that the model does not have: {unknown[:8]}")
        for unit, owned in self._groups():
            for key in sorted({k for n in owned.group.names for k in names.get(n, [])}):
                values = {
                    index: given.get(name, {}).get(key)
                    for index, name in enumerate(owned.group.names)
                    if key in names.get(name, [])
                }
                self._spread(unit, owned, key, values)

    def _groups(self) -> list[tuple[ShardedUnit, OwnedGroup]]:
        return [(u, self._owned[g]) for u in self._whole.units for g in u.groups if g in self._owned]

    def _keys(self, owned: OwnedGroup) -> dict[str, Kind]:
        """The state tensors of a group's parameters, agreed by the ranks (one may own no piece)."""
        mine: dict[str, Kind] = {}
        for piece in owned.pieces:
            for key, value in self._state.get(piece.parameter, {}).items():
                if isinstance(value, Tensor):
                    wide = key != "step" and value.shape == piece.parameter.shape
                    mine[key] = "elements" if wide else mine.get(key, "scalar")
        merged: dict[str, Kind] = {}
        for theirs in self._whole.communicator.share_all(mine):
            for key, kind in theirs.items():
                merged[key] = "elements" if "elements" in (kind, merged.get(key)) else "scalar"
        return dict(sorted(merged.items()))

    def _gather(self, unit: ShardedUnit, owned: OwnedGroup, key: str, kind: Kind) -> Tensor:
        """One state tensor of a whole group: flat in buffer order, or one number per parameter."""
        group = owned.group
        numel = group.layout.shard_numel if kind == "elements" else len(group.names)
        flat = torch.zeros(numel, dtype=torch.float32, device=group.shard.device)
        for piece in owned.pieces:
            value = self._state.get(piece.parameter, {}).get(key)
            if value is not None and kind == "elements":
                flat[piece.piece.shard_slice].copy_(_in_memory_order(value, piece.parameter))
            elif value is not None:
                flat[piece.piece.index] = value
        if kind == "elements":
            return self._whole.gather(unit, group, flat)
        if group.shards > 1:
            self._whole.communicator.all_reduce(unit.name, flat, "max").wait()
        return flat

    def _spread(
        self, unit: ShardedUnit, owned: OwnedGroup, key: str, values: Mapping[int, Tensor | None]
    ) -> None:
        group = owned.group
        numbers: dict[str, float] = self._whole.share(
            {i: v.item() for i, v in values.items() if v is not None and _is_number(v, group, i, key)}
        )
        for piece in owned.pieces:
            number = numbers.get(str(piece.piece.index))
            if number is not None:
                self._put(piece, key, torch.tensor(number))
                piece.history = hash(number)
        wide = {i: v for i, v in values.items() if str(i) not in numbers}
        if wide:
            full = self._whole.spread(unit, group, torch.float32, wide)
            for piece in owned.pieces:
                if piece.piece.index in wide:
                    start = group.layout.slots[piece.piece.index].offset + piece.piece.start
                    self._put(piece, key, full[start : start + piece.piece.length])

    def _put(self, piece: OwnedPiece, key: str, value: Tensor) -> None:
        state, parameter = self._state[piece.parameter], piece.parameter
        if value.dim() == 0:
            if key in state:
                state[key].copy_(value)
            else:
                state[key] = value.clone()  # on the host, as torch's optimizers make it
            return
        if key not in state:
            state[key] = torch.empty_like(parameter.detach())
        _in_memory_order(state[key], parameter).copy_(value)


def _is_number(value: Tensor, group: FlatGroup, index: int, key: str) -> bool:
    """Whether a state tensor is a number about the parameter, not its one element's value."""
    return value.dim() == 0 and (key == "step" or group.layout.specs[index].shape != ())


def _entry(flat: Tensor, group: FlatGroup, index: int, kind: Kind) -> Tensor:
    return view_of(flat, group, index) if kind == "elements" else flat[index]


def _in_memory_order(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """A dense tensor as one dimension, in the order of its parameter's memory; shares its storage."""
    if value.stride() != parameter.stride():
        raise StateError("optimizer state with other strides than its parameter cannot be sharded")
    return value.as_strided((value.numel(),), (1,), value.storage_offset())
