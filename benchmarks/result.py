"""What a benchmark hands to the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

Kind = Literal[
    "step", "optimizer", "collectives", "bandwidth", "saving", "consolidate", "compiled", "offload"
]


@dataclass(frozen=True)
class Result:
    """settings: what the rows have in common. rows: one per thing measured; seconds and bytes, unrounded.
    notes: what a reader must know, such as a peer that is absent."""

    kind: Kind
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """The columns of a row that say how long it took."""
    return {"median": median(seconds), "min": min(seconds), "max": max(seconds)}


def ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Of what was taken in the same round; the median of the rounds."""
    return median(a / b for a, b in zip(first, second, strict=True))
