"""Flights of three ranks, as a recorder writes them."""

from __future__ import annotations

import time
from dataclasses import replace

from zero.observe.flight_file import Collective, Flight, Issuing

GATHER = "all_gather of unit 'blocks.3' (64 x float32)"


def flight(
    rank: int, last: int, state: str = "waited for", alike: tuple[int, ...] = (0, 1, 2), **changed: object
) -> Flight:
    """Of a rank whose last collective is in this state, and those before are done."""
    each = [Collective(n, GATHER, "all_gather", "blocks.3", 256, "done", 9.0, "") for n in range(1, last)]
    held = Collective(last, GATHER, "all_gather", "blocks.3", 256, state, 31.4, "train.py:8 in step")
    place = "train.py:9 in main"
    lines = (Issuing("a", alike, (*each, held)),)
    made = Flight(rank, 3, "host", 100 + rank, time.time(), "", lines, {}, place)
    return replace(made, **changed)  # type: ignore[arg-type]
