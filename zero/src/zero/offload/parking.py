"""A model's state out of the device for a while, and back: `Engine.offload_states`."""

from __future__ import annotations

from collections.abc import Sequence

from zero.errors import UsageError
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.sharding.sharded_unit import ShardedUnit
from zero.tiers.values import lasting


class Parking:
    """away: whether parameters and optimizer state are in host memory, and cannot be used."""

    def __init__(self, units: Sequence[ShardedUnit], optimizer: ShardedOptimizer) -> None:
        self.away = False
        self._units = units
        self._optimizer = optimizer

    def check(self) -> None:
        """Raise UsageError where the state is away."""
        if self.away:
            raise UsageError("the model's state is on the host: call engine.reload_states() first")

    @lasting()
    def park(self) -> None:
        """Move everything to the host; nothing may be gathered."""
        self._optimizer.park()
        for unit in self._units:
            unit.park()
        self.away = True

    @lasting()
    def unpark(self) -> None:
        """Bring it back, bit for bit. Does nothing where nothing is away."""
        handles = [handle for unit in self._units if self.away for handle in unit.unpark()]
        for handle in handles:
            handle.wait()
        self._optimizer.unpark()
        self.away = False
