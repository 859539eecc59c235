"""Which tier each group's state goes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from zero.offload import Kind, Offload, Tier


@dataclass(frozen=True)
class Placement:
    """The tiers of one group. It says nothing of whole buffers, which are on the device while in use.

    visits: its optimizer state is on the device for the step.
    """

    optimizer: Tier = "device"
    params: Tier = "device"
    gradients: Tier = "device"
    visits: bool = False


class _Share:
    """Lets a part of what comes leave the device, spread evenly. part: of 1."""

    def __init__(self, part: float) -> None:
        self._part = part
        self._seen = 0
        self._away = 0

    def see(self, numel: int) -> bool:
        """Whether so many elements more may leave."""
        self._seen += numel
        return self._away + numel <= self._part * self._seen + 0.5

    def leave(self, numel: int) -> None:
        """They do."""
        self._away += numel


class Planner:
    """Places groups one after another, the same on every rank: shards are of equal sizes.

    record_bytes: fp32 state per element of a trainable shard. resolve: what a tier is on this device; where
    the host is the device, nothing has a second copy.
    """

    def __init__(self, offload: Offload, record_bytes: int, resolve: Callable[[Tier], Tier]) -> None:
        self._offload = offload
        self._resolve = resolve
        self._record_bytes = record_bytes
        self._twins = offload.overlap and resolve("host") == "host"
        self._visits = offload.step == "device"
        self._shares: dict[Kind, _Share] = {kind: _Share(offload.part(kind)) for kind in get_args(Kind)}
        self._on_host = 0

    def place(self, shard_numel: int, item_bytes: int, trainable: bool, resident: bool) -> Placement:
        """item_bytes: of a parameter's element. resident: the group's whole buffer stays on the device, and
        its shard is part of it."""
        params = "device" if resident else self._tier("params", self._offload.params, shard_numel)
        if not trainable:
            return Placement(params=params)
        optimizer = self._optimizer_tier(shard_numel, self._host_bytes(shard_numel, item_bytes, params))
        visits = self._visits and optimizer == "host"
        stepped = "device" if visits else optimizer
        return Placement(optimizer, params, self._gradient_tier(shard_numel, stepped), visits)

    def _tier(self, kind: Kind, wanted: Tier, numel: int) -> Tier:
        if wanted == "device" or not self._shares[kind].see(numel):
            return "device"
        self._shares[kind].leave(numel)
        return self._resolve(wanted)

    def _gradient_tier(self, numel: int, stepped: Tier) -> Tier:
        """stepped: where its optimizer state is stepped, or read from to be."""
        if self._offload.gradients is not None:
            return self._tier("gradients", self._offload.gradients, numel)
        return "device" if stepped == "device" else self._resolve("host")

    def _host_bytes(self, numel: int, item_bytes: int, params: Tier) -> int:
        """What a group's optimizer state takes on the host; see `Twin`, and `FlatGroup.settle`."""
        record = numel * self._record_bytes
        if self._visits and item_bytes >= 4 and params == "device":
            return record - numel * item_bytes
        if not self._twins:
            return record
        shard_serves = item_bytes >= 4 and params == "host"
        return 2 * record + (0 if shard_serves else numel * item_bytes)

    def _optimizer_tier(self, numel: int, nbytes: int) -> Tier:
        wanted, share = self._offload.optimizer, self._shares["optimizer"]
        if wanted == "device" or not share.see(numel):
            return "device"
        fits = self._fits(nbytes)
        if not fits and wanted == "host":
            return "device"
        share.leave(numel)
        self._on_host += nbytes if fits else 0
        return self._resolve("host" if fits else "disk")

    def _fits(self, nbytes: int) -> bool:
        budget = self._offload.host_budget
        if budget is None:
            return self._offload.optimizer == "host"
        return self._on_host + nbytes <= budget
