"""Which tier each group's state goes to."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from zero.offload import Kind, Offload, Tier

NEAR = 0.1  # of a kind of state, by which rounding to whole groups may miss a fraction without a word


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
    """Lets a part of what comes leave the device, spread evenly. part: of 1.

    limited: something else than the part has kept some of it there.
    """

    def __init__(self, part: float) -> None:
        self.limited = False
        self._part = part
        self._seen = 0
        self._away = 0
        self._largest = 0

    def see(self, numel: int) -> bool:
        """Whether so many elements more may leave."""
        self._seen += numel
        self._largest = max(self._largest, numel)
        return self._away + numel <= self._part * self._seen + 0.5

    def leave(self, numel: int) -> None:
        """They do."""
        self._away += numel

    def shortfall(self) -> str:
        """How far whole groups have missed the part; "" for not at all, or not by much."""
        close = self._away and self._part * self._seen - self._away <= NEAR * self._seen
        if self.limited or close or not self._seen:
            return ""
        away, largest = self._away / self._seen, self._largest / self._seen
        return f"asked for {self._part:.0%}, {away:.0%} leaves; the largest group has {largest:.0%}"


class Planner:
    """Places groups one after another, the same on every rank: shards are of equal sizes.

    values: of the master's size that a record has for each element; where there is a host budget. resolve:
    what a tier is on this device; where the host is the device, nothing has a second copy.
    """

    def __init__(self, offload: Offload, values: int, resolve: Callable[[Tier], Tier]) -> None:
        self._offload = offload
        self._resolve = resolve
        self._values = values
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

    def warn_of_shortfalls(self) -> None:
        """Once all groups are placed: tell of fractions that whole groups cannot come near."""
        found = {kind: share.shortfall() for kind, share in self._shares.items() if self._leaves(kind)}
        told = "; ".join(f"{kind}: {what}" for kind, what in found.items() if what)
        if told:
            warnings.warn(
                f"Offload(fraction=...) moves whole groups (a unit's parameters of one dtype). {told}. "
                "Make units smaller with Config(units=...), or let all of it leave",
                stacklevel=3,
            )

    def _leaves(self, kind: Kind) -> bool:
        wanted: Tier | None = getattr(self._offload, kind)
        return kind != "activations" and wanted is not None and self._resolve(wanted) != "device"

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
        record = numel * self._values * max(item_bytes, 4)
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
            share.limited = True
            return "device"
        share.leave(numel)
        self._on_host += nbytes if fits else 0
        return self._resolve("host" if fits else "disk")

    def _fits(self, nbytes: int) -> bool:
        budget = self._offload.host_budget
        if budget is None:
            return self._offload.optimizer == "host"
        return self._on_host + nbytes <= budget
