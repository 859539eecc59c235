"""Where each parameter sits in its flat buffer, and which slice a rank owns. Arithmetic only, no tensors.

The buffer of a group is cut into `shards` equal slices; rank r owns elements
[r × shard_numel, (r+1) × shard_numel). A parameter may span slices. Offsets are aligned so that every view
and every slice starts on a cache line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from accelz import Slot

ALIGN_BYTES = 64


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as the layout sees it. stride: the dense strides of its view in the buffer."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that one rank owns.

    index: the parameter's place in the layout. start: first element, counted in the parameter's memory
    order. shard_start: where that element sits in the rank's shard. length: elements, at least 1.
    """

    index: int
    start: int
    shard_start: int
    length: int

    @property
    def shard_slice(self) -> slice:
        return slice(self.shard_start, self.shard_start + self.length)

    def within(self, window: slice) -> Piece | None:
        """Return the part of the piece within a stretch of the shard, placed relative to it; None if none."""
        low = max(self.shard_start, window.start)
        high = min(self.shard_start + self.length, window.stop)
        if low >= high:
            return None
        return Piece(self.index, self.start + low - self.shard_start, low - window.start, high - low)


@dataclass(frozen=True)
class FlatLayout:
    """Slots of a group's parameters in a buffer of `numel` elements with padding, cut into `shards`. block:
    see `plan`."""

    specs: tuple[ParameterSpec, ...]
    slots: tuple[Slot, ...]
    numel: int
    shards: int
    block: int

    @property
    def shard_numel(self) -> int:
        return self.numel // self.shards

    def shard_slice(self, shard: int) -> slice:
        """Return the window of the buffer that makes up `shard`."""
        return slice(shard * self.shard_numel, (shard + 1) * self.shard_numel)

    def pieces(self, shard: int) -> tuple[Piece, ...]:
        """Return the parts of parameters that `shard` owns, in buffer order."""
        window = self.shard_slice(shard)
        wholes = (Piece(index, 0, slot.offset, slot.numel) for index, slot in enumerate(self.slots))
        return tuple(piece for whole in wholes if (piece := whole.within(window)) is not None)

    @cached_property
    def gaps(self) -> tuple[slice, ...]:
        """Elements of the buffer that belong to no parameter."""
        gaps, end = [], 0
        for slot in self.slots:
            if slot.offset > end:
                gaps.append(slice(end, slot.offset))
            end = slot.offset + slot.numel
        return (*gaps, slice(end, self.numel)) if end < self.numel else tuple(gaps)


def plan(specs: Sequence[ParameterSpec], shards: int, itemsize: int, block: int = 1) -> FlatLayout:
    """Lay `specs` out in the given order.

    itemsize: bytes per element. block: elements, a power of two; no block crosses parameters or slices.
    """
    align = max(block, ALIGN_BYTES // itemsize)
    slots, offset = [], 0
    for spec in specs:
        slots.append(Slot(offset, spec.shape, spec.stride, spec.numel))
        offset += _round_up(spec.numel, align)
    return FlatLayout(tuple(specs), tuple(slots), _round_up(max(offset, 1), align * shards), shards, block)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
