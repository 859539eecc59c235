"""Say in what the ranks differ, where they should not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

LACKS = "does not have"
"""So ends what `first_line` says of a line that one of the ranks lacks."""


def first_line(every: Sequence[Sequence[str]], name: Callable[[int], str] = str) -> str:
    """Show the first line in which a rank differs from rank 0. every: lines by rank, not all equal. name:
    says which rank one is."""
    rank, first, other = next(
        (rank, first, other)
        for rank, lines in enumerate(every)
        for first, other in zip_longest(every[0], lines)
        if first != other
    )
    if first is None:
        return f"{other} on rank {name(rank)}, which rank {name(0)} {LACKS}"
    if other is None:
        return f"{first} on rank {name(0)}, which rank {name(rank)} {LACKS}"
    return f"{first} on rank {name(0)} and {other} on rank {name(rank)}"


def first_setting(every: Sequence[Mapping[str, Any]], called: Callable[[int], str] = str) -> str:
    """Show the first setting that is another on some rank than on rank 0. every: by rank, not all equal.
    called: says which rank one is."""
    name, rank = next(
        (name, rank)
        for rank, theirs in enumerate(every)
        for name in {**every[0], **theirs}
        if repr(every[0].get(name, "missing")) != repr(theirs.get(name, "missing"))  # NaN equals NaN
    )
    first, other = (every[r].get(name, "missing") for r in (0, rank))
    return f"{name} is {first} on rank {called(0)} and {other} on rank {called(rank)}"
