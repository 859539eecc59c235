"""What the engine is doing, for whoever gathers or releases."""

from __future__ import annotations

from dataclasses import dataclass

from zero.tiers.tracer import PhaseName


@dataclass
class Phase:
    """What the engine is doing.

    in_backward: inside Engine.backward. in_graph: inside a compiled forward of the whole model, which does
    its own gathers.
    """

    in_backward: bool = False
    in_graph: bool = False

    @property
    def name(self) -> PhaseName:
        """What a unit that comes or goes now is used for."""
        return "backward" if self.in_backward else "forward"
