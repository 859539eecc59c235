"""Where parameters lie in the flat groups of DeepSpeed's optimizers. Arithmetic only.

Stages 1 and 2 put the parameters of a group one after another (with gaps, `param_alignment_paddings`) and cut
the whole into one partition per rank. Stage 3 cuts every parameter into ceil(elements / ranks) elements per
rank, and puts a rank's pieces one after another, across all its sub-groups.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from zero.errors import CorruptCheckpointError


class GroupStretch(NamedTuple):
    """A stretch of a parameter in a rank's flat group.

    start: its first element in the parameter. first: the same in the group.
    """

    start: int
    rank: int
    group: int
    first: int
    length: int


def stage2(
    groups: Sequence[Mapping[str, tuple[int, ...]]],
    sizes: Sequence[Sequence[int]],
    paddings: Sequence[Sequence[int]] | None,
) -> Iterator[tuple[str, list[GroupStretch]]]:
    """Where every parameter of a checkpoint of stage 1 or 2 lies.

    groups: names and shapes of each group, in order. sizes: elements, by rank and group. paddings: for each
    parameter of each group, elements of padding after it. Raises CorruptCheckpointError if these do not fit
    together, as stage3() does.
    """
    if len(groups) != len(sizes[0]):
        raise CorruptCheckpointError(
            f"{len(groups)} groups of names belong to {len(sizes[0])} groups of masters"
        )
    for number, group in enumerate(groups):
        ends = list(accumulate(rank[number] for rank in sizes))
        gaps = paddings[number] if paddings is not None else [0] * len(group)
        if len(gaps) != len(group):
            raise CorruptCheckpointError(
                f"group {number} has {len(group)} parameters and {len(gaps)} paddings"
            )
        position = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            numel = math.prod(shape)
            if position + numel > ends[-1]:
                raise CorruptCheckpointError(f"the masters of group {number} end within {name!r}")
            stretches = _cut(position, numel, ends)
            found = [GroupStretch(at, rank, number, first, length) for at, rank, first, length in stretches]
            yield name, found
            position += numel + gap
        _check_rest(number, position, ends[-1], 2 * len(sizes))


def _check_rest(group: int, used: int, there: int, alignment: int) -> None:
    """Raise unless the elements used and there round up to the same alignment, the rest being padding."""
    if -(-used // alignment) != -(-there // alignment):
        raise CorruptCheckpointError(f"group {group} has {there} masters, and its parameters need {used}")


def _cut(position: int, numel: int, ends: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Where `numel` elements from `position` on lie in parts, one after another, that end at `ends`: of each
    stretch the first element, counted from `position`, its part, the first element there, and its length."""
    start = 0
    while start < numel:
        part = bisect_right(ends, position + start)
        begin = ends[part - 1] if part else 0
        length = min(numel - start, ends[part] - position - start)
        yield start, part, position + start - begin, length
        start += length


def stage3(
    groups: Sequence[Mapping[str, tuple[int, ...]]], sizes: Sequence[Sequence[int]]
) -> Iterator[tuple[str, list[GroupStretch]]]:
    """Where every parameter of a checkpoint of stage 3 lies.

    groups: names and shapes of each sub-group, in order. sizes: elements, by rank and sub-group.
    """
    ranks = len(sizes)
    if any(size != sizes[0] for size in sizes):
        raise CorruptCheckpointError(f"the ranks have masters of different sizes: {sizes}")
    ends = list(accumulate(sizes[0]))
    position = 0
    for name, shape in ((name, shape) for group in groups for name, shape in group.items()):
        numel = math.prod(shape)
        share = -(-numel // ranks)
        if position + share > ends[-1]:
            raise CorruptCheckpointError(f"the masters end within {name!r}")
        found = [
            GroupStretch(rank * share + at, rank, group, first, length)
            for rank in range(ranks)
            for at, group, first, length in _cut(position, min(share, numel - rank * share), ends)
        ]
        yield name, found
        position += share
    if position != ends[-1]:
        raise CorruptCheckpointError(f"each rank has {ends[-1]} masters, and its parameters need {position}")
