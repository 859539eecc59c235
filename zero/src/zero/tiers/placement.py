"""Decide which tier each group's state goes to, and in which sub-groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch

from accelz.updates import REMAINDER
from zero.config.offload import Kind, Offload
from zero.tiers.tier import ON_DEVICE, Tier, wanted
from zero.tiers.values import Column, longest_block
from zero.warning import warn

NEAR = 0.1  # share of all state of a kind by which whole groups may miss a fraction without a warning
ALIGN = 64  # elements


@dataclass(frozen=True)
class PlacementRequest:
    """A group to be placed.

    item_bytes, gradient_bytes: per element of a parameter, and of its reduced gradient. resident: the group's
    whole buffer stays on the device, and its shard is part of it. master, moments: see `Placement`.
    divisible: whether it may be stepped in parts, as a kernel can. beside: what the user's optimizer keeps
    beside records, by rank; empty if it keeps none, or if that is not needed.
    """

    shard_numel: int
    item_bytes: int
    gradient_bytes: int
    trainable: bool
    resident: bool
    master: torch.dtype = torch.float32
    moments: tuple[Column, ...] = ()
    divisible: bool = True
    beside: tuple[int, ...] = ()

    @property
    def align(self) -> int:
        """Elements: every sub-group begins on a cache line, and with a block of its moments."""
        return max(ALIGN, longest_block(self.moments))

    def rounded(self, numel: int) -> int:
        """The most of these elements that may be a sub-group, if others follow."""
        return numel // self.align * self.align


@dataclass(frozen=True)
class Placement:
    """The tiers of one group. Whole buffers are not placed: they are on the device while in use.

    optimizer: (elements, tier) of each sub-group, in the order of the shard; empty for a frozen group.
    master: the dtype of records' masters; of split ones, that of the remainders. moments: what records have
    beside it. streamed: records on the host are on the device for the step.
    """

    optimizer: tuple[tuple[int, Tier], ...] = ()
    master: torch.dtype = torch.float32
    moments: tuple[Column, ...] = ()
    params: Tier = ON_DEVICE
    gradients: Tier = ON_DEVICE
    streamed: bool = False

    @property
    def columns(self) -> tuple[Column, ...]:
        """What a record has whose master is not the shard."""
        return Column(self.master), *self.moments

    @property
    def splits(self) -> bool:
        """Whether records have remainders of masters, which are stepped together with the weights."""
        return self.master is REMAINDER

    def comes(self, tier: Tier) -> bool:
        """Return whether a record in `tier` comes to the device for its step."""
        return self.streamed and tier.in_host_memory

    def shard_serves(self, item_bytes: int, tier: Tier) -> bool:
        """Return whether the shard, of `item_bytes` per element, is itself the master of a record in `tier`.

        It is if it is wide enough and lies where the record does, or where the record is streamed for its
        step.
        """
        there = self.comes(tier) and self.params.near
        return item_bytes >= 4 and (there or (tier is self.params and not tier.stored))


class _Share:
    """Decides, group by group, which of them leave the device.

    At any point about the fraction `part` of the elements so far has left. limited: whether something other
    than the part has kept some of them on the device.
    """

    def __init__(self, part: float) -> None:
        self.limited = False
        self._part = part
        self._seen = 0
        self._away = 0
        self._largest = 0

    def see(self, numel: int) -> bool:
        """Count the next group, of `numel` elements; return whether it may leave."""
        self._seen += numel
        self._largest = max(self._largest, numel)
        return self._away + numel <= self._part * self._seen + 0.5

    def leave(self, numel: int) -> None:
        """Count `numel` elements that leave."""
        self._away += numel

    @property
    def rest(self) -> int:
        """Elements that may still leave."""
        return max(int(self._part * self._seen) - self._away, 0)

    def shortfall(self) -> str:
        """Say by how much whole groups miss the part; "" if they do not, or not by much."""
        close = self._away and self._part * self._seen - self._away <= NEAR * self._seen
        if self.limited or close or not self._seen:
            return ""
        away, largest = self._away / self._seen, self._largest / self._seen
        return f"asked for {self._part:.0%}, {away:.0%} leaves; the largest group has {largest:.0%}"


class _HostRoom:
    """The host's room for one kind of state. budget: bytes per rank."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._taken: tuple[int, ...] = (0,)  # by rank; one number where all have the same

    def fits(self, each: float) -> int:
        """Return how many elements of `each` bytes every rank has room for."""
        return int(max(self._budget - max(self._taken), 0) // each)

    def take(self, nbytes: int, own: Sequence[int] = ()) -> bool:
        """Take `nbytes` on every rank, plus each rank's `own`; return False if a rank lacks the room."""
        before = self._taken if len(self._taken) >= len(own) else self._taken * len(own)
        beside = own or (0,) * len(before)
        after = tuple(taken + nbytes + mine for taken, mine in zip(before, beside, strict=True))
        if max(after) > self._budget:
            return False
        self._taken = after
        return True


class Placer:
    """Places groups, alike on every rank: shards have equal sizes, and each rank knows what the others keep.

    host: what the host's tier is on this device; if the host is the device, nothing has a second copy.
    """

    def __init__(self, offload: Offload, host: Tier) -> None:
        self._offload = offload
        self._host = host
        self._shares: dict[Kind, _Share] = {kind: _Share(offload.part(kind)) for kind in get_args(Kind)}
        budgets: dict[Kind, int | None] = {kind: offload.budget(kind) for kind in get_args(Kind)}
        self._room = {kind: _HostRoom(limit) for kind, limit in budgets.items() if limit is not None}

    def place(self, groups: Sequence[PlacementRequest]) -> list[Placement]:
        """Place all groups of a model, in its order."""
        leaving = self._leaving(groups)
        return [self._place(group, away) for group, away in zip(groups, leaving, strict=True)]

    def warn_of_shortfalls(self, rank: int) -> None:
        """Warn, once all groups are placed, of fractions that whole groups cannot come near.

        rank: this rank's number in the job.
        """
        found = {kind: share.shortfall() for kind, share in self._shares.items() if self._leaves(kind)}
        told = "; ".join(f"{kind}: {what}" for kind, what in found.items() if what)
        if told:
            warn(
                "Offload(fraction=...) moves whole groups (a unit's matrices, or the rest of it) of "
                f"everything but optimizer state that kernels step. {told}. Make units smaller with "
                "Config(units=...), or offload all of it",
                rank=rank,
            )

    def _place(self, group: PlacementRequest, away: int) -> Placement:
        params = ON_DEVICE if group.resident else self._tier("params", group.shard_numel, group.item_bytes)
        if not group.trainable:
            return Placement(params=params)
        records = tuple(self._cut(group, self._divide(group, params, away)))
        placed = Placement(records, group.master, group.moments, params, streamed=self._offload.streams)
        stepped_there = all(tier.near or placed.comes(tier) for _, tier in records)
        return replace(placed, gradients=self._gradient_tier(group, stepped_there))

    def _leaving(self, groups: Sequence[PlacementRequest]) -> list[int]:
        """Return how many elements of each group have their optimizer state away from the device.

        For all but one or two groups that is all or none, so that a group's gradients have one tier.
        """
        share = self._shares["optimizer"]
        sizes = [group.shard_numel if group.trainable else 0 for group in groups]
        if wanted(self._offload, "optimizer").near:
            return [0] * len(sizes)
        away = []
        for numel in sizes:
            leaves = share.see(numel)
            share.leave(numel if leaves else 0)
            away.append(numel if leaves else 0)
        home = [i for i, group in enumerate(groups) if away[i] < sizes[i] and group.divisible]
        for index in sorted(home, key=lambda i: -sizes[i]):
            away[index] = groups[index].rounded(min(share.rest, sizes[index]))
            share.leave(away[index])
        return away

    def _divide(self, group: PlacementRequest, params: Tier, away: int) -> Iterator[tuple[int, Tier]]:
        """Divide the shard, from its beginning: what goes to the host, what goes to disk, what stays."""
        host = self._take_records(group, away, self._host_bytes(group, params))
        beyond = wanted(self._offload, "optimizer").beyond_budget
        if host < away and beyond.near:
            self._shares["optimizer"].limited = True
        yield host, self._host
        yield away - host, beyond
        yield group.shard_numel - away, ON_DEVICE

    def _cut(
        self, group: PlacementRequest, stretches: Iterator[tuple[int, Tier]]
    ) -> Iterator[tuple[int, Tier]]:
        """Cut stretches into sub-groups of the configured size; all that stays on the device is one."""
        near, most = 0, group.rounded(self._offload.sub_group_size + group.align - 1)
        for numel, tier in stretches:
            if tier.near:
                near += numel
                continue
            while numel > 0:
                size = min(numel, most) if group.divisible else numel
                yield size, tier
                numel -= size
        if near:
            yield near, ON_DEVICE

    def _take_host(self, kind: Kind, nbytes: int, own: Sequence[int] = ()) -> bool:
        """Return whether the host takes values of `nbytes`, and each rank's `own`."""
        if kind not in self._room:
            return wanted(self._offload, kind).in_host_memory
        return not nbytes or self._room[kind].take(nbytes, own)

    def _take_records(self, group: PlacementRequest, numel: int, each: float) -> int:
        """Return how many of `numel` elements' records, of `each` bytes per element, the host takes."""
        if self._take_host("optimizer", int(numel * each), group.beside):
            return numel
        if "optimizer" not in self._room or not group.divisible:
            return 0
        some = group.rounded(self._room["optimizer"].fits(each))
        self._room["optimizer"].take(int(some * each))
        return some

    def _leaves(self, kind: Kind) -> bool:
        tier = wanted(self._offload, kind)
        return kind != "activations" and not (self._host if tier.in_host_memory else tier).near

    def _tier(self, kind: Kind, numel: int, each: int) -> Tier:
        """Return the tier of `numel` values, of `each` bytes, that stay together."""
        share, tier = self._shares[kind], wanted(self._offload, kind)
        if tier.near or not share.see(numel):
            return ON_DEVICE
        if self._take_host(kind, numel * each):
            share.leave(numel)
            return self._host
        if tier.beyond_budget.near:
            share.limited = True
        else:
            share.leave(numel)
        return tier.beyond_budget

    def _gradient_tier(self, group: PlacementRequest, stepped_there: bool) -> Tier:
        """Return the gradients' tier. stepped_there: the device steps all of the group's optimizer state."""
        if self._offload.gradients is not None:
            return self._tier("gradients", group.shard_numel, group.gradient_bytes)
        return ON_DEVICE if stepped_there else self._host

    def _host_bytes(self, group: PlacementRequest, params: Tier) -> float:
        """Return the host bytes of an element's optimizer state, less a shard that is the master."""
        item_bytes = group.item_bytes
        record = group.master.itemsize + sum(column.bytes_each for column in group.moments)
        there = Placement(params=params, streamed=self._offload.streams)
        serves = there.shard_serves(item_bytes, self._host)
        return record - (item_bytes if serves else 0)
