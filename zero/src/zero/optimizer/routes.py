"""Which rank steps a parameter that is stepped whole, and how values travel between there and the slices.

Arithmetic only, no tensors. What the ranks' slices have of a rank's parameters, put together in the order of
the ranks, are those parameters one after another: slices and parameters are in the order of one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zero.sharding.layout import FlatLayout, Piece

Owners = Sequence[int | None]
"""The rank that steps each parameter of a group; None for those that the optimizer does not know."""


@dataclass(frozen=True)
class Routes:
    """Of one group and rank. counts[s][r]: elements that slice s has of what rank r steps. windows: of this
    rank's slice, in the order of the ranks that step them. pieces: the parameters that this rank steps, each
    with its place among them."""

    counts: tuple[tuple[int, ...], ...]
    windows: tuple[slice, ...]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Elements of the parameters that this rank steps."""
        return sum(piece.length for piece in self.pieces)

    @cached_property
    def back(self) -> tuple[tuple[int, ...], ...]:
        """Counts of the way from the parameters to the slices."""
        return tuple(zip(*self.counts, strict=True))


def share_out(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each parameter: the largest first, to the rank that has least until then.

    No rank has more than 4/3 of what the best distribution would give it (Graham, Bounds on Multiprocessing
    Timing Anomalies, 1969).
    """
    loads = [0] * ranks
    found = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = loads.index(min(loads))
        found[index] = rank
        loads[rank] += sizes[index]
    return found


def route(layout: FlatLayout, owners: Owners, rank: int) -> Routes:
    """owners: by a parameter's place in the layout."""
    slices = [layout.pieces(shard) for shard in range(layout.shards)]
    counts = tuple(
        tuple(sum(p.length for p in pieces if owners[p.index] == r) for r in range(layout.shards))
        for pieces in slices
    )
    mine = sorted(
        (p for p in slices[rank] if owners[p.index] is not None), key=lambda p: owners[p.index] or 0
    )
    whole, place = [], 0
    for index, spec in enumerate(layout.specs):
        if owners[index] == rank and spec.numel:
            whole.append(Piece(index, 0, place, spec.numel))
            place += spec.numel
    return Routes(counts, tuple(piece.shard_slice for piece in mine), tuple(whole))
