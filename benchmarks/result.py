"""What a benchmark hands to the report."""

from __future__ import annotations

from dataclasses import dataclass, field
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
