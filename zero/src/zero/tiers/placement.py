"""Which tier each group's state goes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zero.offload import Offload, Tier


@dataclass(frozen=True)
class Placement:
    """The tiers of one group. It says nothing of whole buffers, which are on the device while in use."""

    optimizer: Tier = "device"
    params: Tier = "device"
    gradients: Tier = "device"


class Planner:
    """Places groups one after another, the same on every rank: shards are of equal sizes.

    record_bytes: fp32 state per element of a trainable shard. resolve: what a tier is on this device.
    """

    def __init__(self, offload: Offload, record_bytes: int, resolve: Callable[[Tier], Tier]) -> None:
        self._offload = offload
        self._resolve = resolve
        self._record_bytes = record_bytes
        self._seen = 0
        self._away = 0
        self._on_host = 0

    def place(self, shard_numel: int, trainable: bool, resident: bool) -> Placement:
        """resident: the group's whole buffer stays on the device, and its shard is part of it."""
        params = "device" if resident else self._resolve(self._offload.params)
        if not trainable:
            return Placement(params=params)
        optimizer = self._resolve(self._optimizer_tier(shard_numel))
        return Placement(optimizer, params, self._resolve(self._offload.gradient_tier))

    def _optimizer_tier(self, numel: int) -> Tier:
        wanted = self._offload.optimizer
        self._seen += numel
        if wanted == "device" or self._away + numel > self._offload.fraction * self._seen + 0.5:
            return "device"
        nbytes = numel * self._record_bytes
        if self._fits(nbytes):
            self._on_host += nbytes
            tier: Tier = "host"
        else:
            tier = "disk" if wanted == "disk" else "device"
        if tier != "device":
            self._away += numel
        return tier

    def _fits(self, nbytes: int) -> bool:
        budget = self._offload.host_budget
        if budget is None:
            return self._offload.optimizer == "host"
        return self._on_host + nbytes <= budget
