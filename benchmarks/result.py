"""What a benchmark passes to the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

Kind = Literal[
    "step",
    "optimizer",
    "collectives",
    "bandwidth",
    "saving",
    "consolidate",
    "compiled",
    "offload",
    "bits",
    "qlora",
]


@dataclass(frozen=True)
class Result:
    """The result of one benchmark.

    settings: what the rows have in common. rows: one for each thing measured; seconds and bytes, unrounded.
    notes: what a reader must know, such as that a peer is absent.
    """

    kind: Kind
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """The columns of a row that give its time."""
    return {"median": median(seconds), "min": min(seconds), "max": max(seconds)}


def ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """The median, over rounds, of the ratio of two measurements in the same round."""
    return median(a / b for a, b in zip(first, second, strict=True))
