"""What has happened on a rank, perhaps on it alone, for the whole job to be told."""

from __future__ import annotations

from collections.abc import Mapping

Notes = Mapping[str, str]
"""A rank's, by what they are about."""


def not_everywhere(every: Mapping[int, Notes], size: int) -> list[tuple[list[int], str]]:
    """Return what some of the ranks have noted, and which ranks: one text for each thing noted.

    every: of those that are known, by rank. size: how many ranks there are.
    """
    found = []
    for about in dict.fromkeys(about for notes in every.values() for about in notes):
        ranks = [rank for rank, notes in every.items() if about in notes]
        if len(ranks) < size:
            found.append((ranks, every[ranks[0]][about]))
    return found
