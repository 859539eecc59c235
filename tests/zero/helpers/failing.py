"""What tests of ranks that fail or differ share."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from accelz.conformance.cluster import Cluster

Ranks = Callable[[int], Cluster]
TIMEOUT = 4.0  # seconds; a busy machine needs one or two to form the groups


class Reordered(nn.Module):
    """Equal blocks, called in an order of its own on each rank."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x
