"""Values of groups on their way between the ranks' slices and whole parameters, along `routes`.

What may run out of memory is separate from what is collective, so that ranks can agree in between, once for
all groups: these take turns in one room on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from accelz import HOST, Group
from zero.communication.communicator import Communicator
from zero.files.boxes import Box, Region
from zero.optimizer.routes import Arrival, Routes
from zero.sharding.shard_source import fetch
from zero.tiers.stores import Stores
from zero.tiers.values import Values


class ParameterExchange:
    """Exchanges go through the device, wherever the values come from and go to. nbytes: of the room."""

    def __init__(self, stores: Stores, communicator: Communicator) -> None:
        self._device = stores.accelerator.device
        self._communicator = communicator
        self._rooms: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._rooms is None else sum(room.nbytes for room in self._rooms)

    def open(self, sizes: Iterable[tuple[int, int]]) -> None:
        """Make room for exchanges, each of so many bytes of this rank's slice and of whole parameters that do
        not lie where they can be exchanged."""
        parts, wholes = (max(each) for each in zip(*sizes, strict=True))
        self._rooms = (self._empty(parts), self._empty(wholes))

    def close(self) -> None:
        self._rooms = None

    def parts(self, routes: Routes, dtype: torch.dtype) -> Tensor:
        """Room for the parts of this rank's slice, rank by rank, that belong to the parameters that each rank
        steps."""
        return self._room(0, sum(routes.given), dtype)

    def whole(self, routes: Routes, dtype: torch.dtype) -> Tensor:
        """Room for the parameters that this rank steps, one after another."""
        return self._room(1, routes.numel, dtype)

    def _whole_and_scratch(self, routes: Routes, dtype: torch.dtype) -> list[Tensor]:
        """The same room, and after it that for the largest block that goes in several stretches."""
        sizes = [routes.numel, routes.scattered]
        return list(self._room(1, sum(sizes), dtype).split(sizes))

    def cut(self, routes: Routes, slice_: Values, parts: Tensor) -> None:
        """Fill `parts` from this rank's slice, (shard_numel,), of any tier."""
        if not parts.numel():
            return
        near = slice_ if isinstance(slice_, Tensor) else fetch(slice_, HOST, self._communicator)
        windows = [near[window] for window in routes.windows]
        if near.device == parts.device:
            torch.cat(windows, out=parts)
        else:
            parts.copy_(torch.cat(windows))

    def assemble(self, unit: str, ranks: Group, routes: Routes, parts: Tensor, whole: Tensor) -> None:
        """Collective. Fill `whole`, (routes.numel,), with the parameters that this rank steps, or with the
        blocks of these that each rank has, from every rank's `parts`. Both are on the device."""
        self._communicator.all_to_all(
            unit, whole, parts, routes.taken, routes.given, routes.total, ranks
        ).wait()

    def take_apart(self, unit: str, ranks: Group, routes: Routes, whole: Tensor, slice_: Tensor) -> None:
        """Collective. The reverse of `cut` and `assemble`, into this rank's `slice_`. Allocates nothing on
        the device: a rank that could not would keep the others waiting."""
        parts, near = self.parts(routes, whole.dtype), whole
        if routes.joins_blocks:
            near, scratch = self._whole_and_scratch(routes, whole.dtype)
            divide(whole, routes, near, scratch)
        elif whole.device != self._device:
            near = self.whole(routes, whole.dtype).copy_(whole)
        self._communicator.all_to_all(
            unit, parts, near, routes.given, routes.taken, routes.total, ranks
        ).wait()
        lengths = [window.stop - window.start for window in routes.windows]
        for window, part in zip(routes.windows, parts.split(lengths), strict=True):
            slice_[window].copy_(part)

    def _empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _room(self, which: int, numel: int, dtype: torch.dtype) -> Tensor:
        assert self._rooms is not None
        return self._rooms[which][: numel * dtype.itemsize].view(dtype)


def join(blocks: Tensor, routes: Routes, whole: Tensor) -> None:
    """Fill `whole` with the parameters that this rank steps, from their blocks as they have arrived."""
    for arrival in routes.arrivals:
        block = torch.cat([blocks[stretch] for stretch in arrival.stretches]).view(arrival.region.shape)
        for values, here in _boxes(whole, routes, arrival):
            values.copy_(block[here])


def divide(whole: Tensor, routes: Routes, blocks: Tensor, scratch: Tensor) -> None:
    """The reverse of `join`. scratch: for blocks that go in several stretches, (routes.scattered,)."""
    for arrival in routes.arrivals:
        stretches = arrival.stretches
        block = blocks[stretches[0]] if len(stretches) == 1 else scratch[: arrival.numel]
        for values, here in _boxes(whole, routes, arrival):
            block.view(arrival.region.shape)[here].copy_(values)
        if len(stretches) > 1:
            lengths = [stretch.stop - stretch.start for stretch in stretches]
            for stretch, part in zip(stretches, block.split(lengths), strict=True):
                blocks[stretch].copy_(part)


def _boxes(whole: Tensor, routes: Routes, arrival: Arrival) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """The boxes of a parameter that a block has: views of its values, and indices of the block."""
    shape = routes.specs[arrival.piece.index].shape
    values = whole[arrival.piece.shard_slice].view(shape)
    for there, here in Region.whole(shape).common(Box((0,) * len(shape), shape), arrival.region):
        yield values[there.slices], here.slices
