"""Moves a model's state off the device for a while, and back: `Engine.offload_states`."""

from __future__ import annotations

from collections.abc import Sequence

from zero.communication.communicator import Communicator
from zero.errors import OffloadError
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.sharding.sharded_unit import ShardedUnit, refill
from zero.tiers.values import lasting


class StateOffload:
    """away: whether parameters and optimizer state are on the host, or on their way, and cannot be used."""

    def __init__(
        self, units: Sequence[ShardedUnit], optimizer: ShardedOptimizer, communicator: Communicator
    ) -> None:
        self.away = False
        self._units = units
        self._optimizer = optimizer
        self._communicator = communicator

    @lasting()
    def offload(self) -> None:
        """Move everything to the host, while nothing is gathered. After an error part of it is away; both
        this and `reload_state` go on from there."""
        self.away = True
        self._optimizer.offload_state()
        for unit in self._units:
            unit.offload_state()

    @lasting()
    def reload(self) -> None:
        """Bring it back, bit for bit. Collective: if one rank has no room for its own state, no rank waits
        for it in a gather, and all may try again."""
        error: Exception | None = None
        try:
            for unit in self._units:
                unit.reload_state()
            self._optimizer.reload_state()
        except Exception as problem:
            error = problem
        elsewhere = self._communicator.agree(error is not None)
        if error is not None:
            raise error
        if elsewhere:
            raise OffloadError(_ELSEWHERE)
        for unit in self._units:
            if unit.resident:
                unit.guard.expose()
        refill(self._units, frozen=True)
        self.away = False


_ELSEWHERE = (
    "reload_states() failed on another rank, whose error says why. Nothing is lost: once there is room, call "
    "it again on every rank"
)
