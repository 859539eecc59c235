"""What is told of a step, so that its use of memory can be followed unit by unit."""

from __future__ import annotations

from typing import Literal, Protocol

PhaseName = Literal["forward", "backward", "step"]


class Tracer(Protocol):
    """Follows steps, or does nothing while nobody has asked for that."""

    def mark(self, phase: PhaseName, unit: str) -> None:
        """A unit comes or goes, or a part of it has been stepped; "" stands for no unit."""
