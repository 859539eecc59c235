"""Which rank steps a parameter that is stepped whole, and how values travel between it and the slices.

Arithmetic only, no tensors. Slices and parameters have the order of one buffer. So the ranks' slices of one
rank's parameters, put together in the order of the ranks, are those parameters one after another.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from zero.sharding.layout import FlatLayout, Piece

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Routes:
    """The routes of one group, for one rank.

    pieces: the parameters that this rank steps, each with its place among them.
    windows: of this rank's slice, in the order of the ranks that step them.
    given[r]: elements of this rank's slice that rank r steps. taken[r]: elements of rank r's slice that this
        rank steps.
    total: elements that all ranks together step.
    """

    pieces: tuple[Piece, ...]
    windows: tuple[slice, ...]
    given: tuple[int, ...]
    taken: tuple[int, ...]
    total: int

    @property
    def numel(self) -> int:
        """Elements of the parameters that this rank steps."""
        return sum(self.taken)


def share_out(sizes: Iterable[tuple[K, int, int]]) -> dict[K, int]:
    """Give each parameter one of the ranks that have slices of it: the largest first, each to the rank that
    has least so far of those that are cut into as many slices.

    sizes: parameters, their elements and numbers of slices. All ranks come to the same assignment. The
    largest load is at most 4/3 of what it is in the best distribution (Graham, Bounds on Multiprocessing
    Timing Anomalies, 1969).
    """
    loads: dict[int, list[int]] = {}  # by the number of slices
    found: dict[K, int] = {}
    for key, numel, slices in sorted(sizes, key=lambda item: -item[1]):
        of_ranks = loads.setdefault(slices, [0] * slices)
        found[key] = rank = of_ranks.index(min(of_ranks))
        of_ranks[rank] += numel
    return found


def route(layout: FlatLayout, stepped_by: Sequence[int | None], rank: int) -> Routes:
    """The routes of a group for `rank`. stepped_by: a rank for each parameter of the layout, None for those
    that nobody steps."""
    windows: list[list[slice]] = [[] for _ in range(layout.shards)]
    for piece in layout.pieces(rank):
        receiver = stepped_by[piece.index]
        if receiver is not None:
            windows[receiver].append(piece.shard_slice)
    whole: list[Piece] = []
    taken = [0] * layout.shards
    for index, slot in enumerate(layout.slots):
        if stepped_by[index] == rank and slot.numel:
            whole.append(Piece(index, 0, sum(taken), slot.numel))
            for shard, length in _lengths(layout, slot.offset, slot.offset + slot.numel):
                taken[shard] += length
    total = sum(s.numel for s, receiver in zip(layout.slots, stepped_by, strict=True) if receiver is not None)
    given = tuple(sum(window.stop - window.start for window in each) for each in windows)
    return Routes(tuple(whole), tuple(w for each in windows for w in each), given, tuple(taken), total)


def _lengths(layout: FlatLayout, begin: int, end: int) -> Iterable[tuple[int, int]]:
    """How much of a stretch of the buffer each shard has."""
    size = layout.shard_numel
    for shard in range(begin // size, -(-end // size)):
        yield shard, min(end, (shard + 1) * size) - max(begin, shard * size)
