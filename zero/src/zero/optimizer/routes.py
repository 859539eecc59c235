"""Which rank steps a parameter that is stepped whole, and how values travel between it and the slices.

Arithmetic only, no tensors. Slices and parameters have the order of one buffer. So the ranks' slices of one
rank's parameters, put together in the order of the ranks, are those parameters one after another. Where
parameters are divided along other dimensions of a mesh, what is put together are their blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from zero.files.boxes import Region
from zero.sharding.layout import FlatLayout, ParameterSpec, Piece

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Blocks:
    """How the blocks of a group's parameters are spread over the ranks that together have all of them.

    specs: the whole parameters, row-major. layouts: of the group on ranks that have other blocks. regions:
    for each of these, what it has of each parameter; none where all ranks have the same layout. sources: for
    each rank, the number of its layout and its slice of that.
    """

    specs: tuple[ParameterSpec, ...]
    layouts: tuple[FlatLayout, ...]
    regions: tuple[tuple[Region, ...], ...]
    sources: tuple[tuple[int, int], ...]

    @classmethod
    def undivided(cls, layout: FlatLayout) -> Blocks:
        """Of parameters that ranks have nothing but slices of."""
        return cls(layout.specs, (layout,), (), tuple((0, shard) for shard in range(layout.shards)))


@dataclass(frozen=True)
class Arrival:
    """A block of a parameter that this rank steps. piece: the parameter's place among those. region: what it
    has of it. stretches: of what arrives, that are its elements in row-major order."""

    piece: Piece
    region: Region
    stretches: tuple[slice, ...]

    @property
    def numel(self) -> int:
        return sum(stretch.stop - stretch.start for stretch in self.stretches)


@dataclass(frozen=True)
class Routes:
    """The routes of one group, for one rank.

    specs: the parameters as they are stepped. pieces: those that this rank steps, each with its place among
        them.
    windows: of this rank's slice, in the order of the ranks that step them.
    given[r]: elements of this rank's slice that rank r steps. taken[r]: elements of rank r's slice that this
        rank steps.
    total: elements that all ranks together step.
    joins_blocks: whether parameters are divided into blocks. arrivals: those that arrive then.
    """

    specs: tuple[ParameterSpec, ...]
    pieces: tuple[Piece, ...]
    windows: tuple[slice, ...]
    given: tuple[int, ...]
    taken: tuple[int, ...]
    total: int
    joins_blocks: bool
    arrivals: tuple[Arrival, ...]

    @property
    def numel(self) -> int:
        """Elements of the parameters that this rank steps."""
        return sum(self.taken)

    @property
    def scattered(self) -> int:
        """Elements of the largest block that arrives in several stretches."""
        return max((each.numel for each in self.arrivals if len(each.stretches) > 1), default=0)


def share_out(sizes: Iterable[tuple[K, int, int]]) -> dict[K, int]:
    """Give each parameter one of the ranks that have slices of it: the largest first, each to the rank that
    has least so far of those that are cut into as many slices.

    sizes: parameters, their elements and numbers of slices, with those of other blocks. All ranks come to the
    same assignment. The largest load is at most 4/3 of what it is in the best distribution (Graham, Bounds on
    Multiprocessing Timing Anomalies, 1969).
    """
    loads: dict[int, list[int]] = {}  # by the number of slices
    found: dict[K, int] = {}
    for key, numel, slices in sorted(sizes, key=lambda item: -item[1]):
        of_ranks = loads.setdefault(slices, [0] * slices)
        found[key] = rank = of_ranks.index(min(of_ranks))
        of_ranks[rank] += numel
    return found


def route(blocks: Blocks, stepped_by: Sequence[int | None], rank: int) -> Routes:
    """The routes of a group for `rank`. stepped_by: a rank for each parameter of the group, None for those
    that nobody steps."""
    windows: list[list[slice]] = [[] for _ in blocks.sources]
    number, shard = blocks.sources[rank]
    for piece in blocks.layouts[number].pieces(shard):
        receiver = stepped_by[piece.index]
        if receiver is not None:
            windows[receiver].append(piece.shard_slice)
    mine = [i for i, spec in enumerate(blocks.specs) if stepped_by[i] == rank and spec.numel]
    whole: list[Piece] = []
    for index in mine:
        begin = whole[-1].shard_slice.stop if whole else 0
        whole.append(Piece(index, 0, begin, blocks.specs[index].numel))
    came = {index: _came(blocks, index) for index in mine}
    taken = [0] * len(blocks.sources)
    for source, length in (each for stretches in came.values() for block in stretches for each in block):
        taken[source] += length
    stepped = zip(blocks.specs, stepped_by, strict=True)
    return Routes(
        specs=blocks.specs,
        pieces=tuple(whole),
        windows=tuple(window for each in windows for window in each),
        given=tuple(sum(window.stop - window.start for window in each) for each in windows),
        taken=tuple(taken),
        total=sum(spec.numel for spec, receiver in stepped if receiver is not None),
        joins_blocks=bool(blocks.regions),
        arrivals=tuple(_arrivals(blocks, whole, came, taken)) if blocks.regions else (),
    )


def _came(blocks: Blocks, index: int) -> list[list[tuple[int, int]]]:
    """Of each block of a parameter: its stretches in order, each with the rank that has it and its length."""
    numbers = {source: rank for rank, source in enumerate(blocks.sources)}
    found = []
    for number, layout in enumerate(blocks.layouts):
        slot = layout.slots[index]
        lengths = _lengths(layout, slot.offset, slot.offset + slot.numel)
        found.append([(numbers[number, shard], length) for shard, length in lengths if length])
    return found


def _arrivals(
    blocks: Blocks,
    pieces: Iterable[Piece],
    came: Mapping[int, list[list[tuple[int, int]]]],
    taken: Sequence[int],
) -> Iterable[Arrival]:
    """What arrives, rank by rank, and from each in the order of the parameters, by blocks."""
    ends = list(accumulate(taken, initial=0))
    for piece in pieces:
        for regions, block in zip(blocks.regions, came[piece.index], strict=True):
            stretches = []
            for source, length in block:
                stretches.append(slice(ends[source], ends[source] + length))
                ends[source] += length
            if stretches:
                yield Arrival(piece, regions[piece.index], tuple(stretches))


def _lengths(layout: FlatLayout, begin: int, end: int) -> Iterable[tuple[int, int]]:
    """How much of a stretch of the buffer each shard has."""
    size = layout.shard_numel
    for shard in range(begin // size, -(-end // size)):
        yield shard, min(end, (shard + 1) * size) - max(begin, shard * size)
