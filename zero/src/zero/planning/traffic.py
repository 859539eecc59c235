"""What moves in an optimizer step of eager training, between ranks, memories and the disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from zero.config.training import Config
from zero.gradients.group_gradients import GradientPolicy
from zero.planning.groups import PlannedGroup, PlannedUnit
from zero.planning.order import backward_uses, end, forward_uses


@dataclass(frozen=True, kw_only=True)
class TrafficPlan:
    """Bytes of one rank in an optimizer step, all micro-batches together; in the first, which has yet to find
    the order of units, more is gathered.

    to_host, to_device: between the memories. read, written: of the disk. collectives: by kind, of whole
    buffers, as `Engine.traffic` counts them, but without single numbers. link: how much of them leaves this
    rank, at best. to_copies: how much of that goes to ranks of other copies.
    """

    to_host: int = 0
    to_device: int = 0
    read: int = 0
    written: int = 0
    collectives: dict[str, int]
    link: int
    to_copies: int


Moves = Iterator[tuple[str, int]]
"""The way, as in `TrafficPlan`, and bytes."""


def plan_traffic(
    units: Sequence[PlannedUnit], config: Config, policy: GradientPolicy, replicas: int
) -> TrafficPlan:
    """Plan what one rank moves in an optimizer step.

    Each unit is used once in a forward, in the order of names. A backward comes to a unit if one of its
    parameters is trained, or one with an earlier name; where inputs, a recomputation or another order take
    the backward further, more is gathered. replicas: how many copies of the model there are.
    """
    micro_batches = config.gradient_accumulation_steps or 1
    reductions = 1 if policy.local else micro_batches
    collectives: dict[str, int] = {}
    inside = 0.0  # bytes that leave this rank for others that share its copy
    between = 0  # bytes of the slices that replicas add up
    moved = Counter[str]()
    kept = _kept_between(units, config.prefetch)
    for unit in units:
        gathers = micro_batches * (2 if unit.reached and unit.name not in kept else 1)
        for group in unit.groups:
            for kind, nbytes, ranks in _collectives(group, reductions, gathers):
                collectives[kind] = collectives.get(kind, 0) + nbytes
                inside += nbytes * _passes(kind, ranks) * (ranks - 1) / ranks
            between += _between_replicas(group, reductions, policy.fixed_tiers) if replicas > 1 else 0
            for way, nbytes in chain(
                _of_parameters(group, gathers),
                _of_gradients(group, reductions),
                _of_records(group),
                _of_exchange(group),
            ):
                moved[way] += nbytes
    to_copies = int(between * _passes("all_reduce", replicas) * (replicas - 1) / replicas)
    if between:
        collectives["all_reduce"] = collectives.get("all_reduce", 0) + between
    link = int(inside) + to_copies
    return TrafficPlan(**moved, collectives=collectives, link=link, to_copies=to_copies)


def _passes(kind: str, ranks: int) -> float:
    """How many times a rank sends its part of a buffer to all others."""
    return {"all_reduce": 2.0, "all_to_all": 1 / ranks}.get(kind, 1.0)


def _kept_between(units: Sequence[PlannedUnit], prefetch: int) -> set[str]:
    """Names of units that backward needs as soon as forward is done with them, and that are therefore
    gathered once."""
    gathered = [unit for unit in units if unit.gathered]
    forward = forward_uses(gathered)
    uses = [unit.name for unit in (*forward, *backward_uses(gathered))]
    ends = {unit.name: end(unit, forward) for unit in forward}
    return {name for name, over in ends.items() if name in uses[over : over + 1 + prefetch]}


def _collectives(group: PlannedGroup, reductions: int, gathers: int) -> Iterator[tuple[str, int, int]]:
    """The kind of each, its bytes, and the number of ranks in it."""
    if group.whole is not None:  # gradients, masters, and these again as they are then
        nbytes = group.whole.of_all * (group.slice.itemsize + 2 * group.wide.itemsize)
        yield "all_to_all", nbytes, group.whole.ranks
    if group.ranks == 1:
        return
    if not group.sharded:
        if group.trainable:
            yield "all_reduce", reductions * group.sent_bytes, group.ranks
        return
    if group.trainable:
        yield "reduce_scatter", reductions * group.sent_bytes, group.ranks
    if not group.resident:
        yield "all_gather", gathers * group.travel_bytes, group.ranks
    elif group.trainable:
        yield "all_gather", group.own_bytes, group.ranks  # after the step


def _between_replicas(group: PlannedGroup, reductions: int, settled: bool) -> int:
    """Bytes that are added up over the replicas: slices that stay, once the micro-batches are added up;
    others, every time they come."""
    if not group.trainable:
        return 0
    if group.placement.gradients.near and settled:
        return group.slice_bytes
    return reductions * group.shard_numel * group.sent.itemsize


def _of_parameters(group: PlannedGroup, gathers: int) -> Moves:
    """Shards that are away come for each gather, and new values go back."""
    tier = group.placement.params
    if tier.near:
        return
    if any(t.near for _, t in group.placement.optimizer):
        yield "to_host", group.shard_bytes
    yield "to_device", gathers * group.shard_bytes
    if tier.stored:
        yield "read", gathers * group.shard_bytes
        yield "written", group.shard_bytes if group.trainable else 0


def _of_gradients(group: PlannedGroup, reductions: int) -> Moves:
    """Slices leave as they are reduced, and come back where they are stepped on the device."""
    tier = group.placement.gradients
    if not group.trainable or tier.near:
        return
    yield "to_host", reductions * group.shard_numel * group.sent.itemsize
    back = sum(n for n, t in group.placement.optimizer if t.near or group.placement.streamed)
    yield "to_device", back * group.slice.itemsize
    if tier.stored:
        yield "read", reductions * group.slice_bytes  # to be added to, and by the step
        yield "written", reductions * group.slice_bytes


def _of_records(group: PlannedGroup) -> Moves:
    """Master and moments, there and back; and the weights of the records that the host has stepped."""
    placed = group.placement
    for numel, tier in placed.optimizer:
        if placed.splits:
            yield from _of_split(group, numel * group.dtype.itemsize, tier.near or placed.streamed)
        if tier.near:
            continue
        nbytes = group.record_bytes(numel, tier)
        if placed.streamed:
            yield from (("to_host", nbytes), ("to_device", nbytes))
            continue
        if tier.stored:
            yield from (("read", nbytes), ("written", nbytes))
        if placed.params.near:
            yield "to_device", numel * group.dtype.itemsize


def _of_split(group: PlannedGroup, nbytes: int, near: bool) -> Moves:
    """Weights, of `nbytes`, come where their split masters are stepped. near: on the device."""
    params = group.placement.params
    yield "read", nbytes if params.stored else 0
    if params.near != near:
        yield ("to_device" if near else "to_host"), nbytes


def _of_exchange(group: PlannedGroup) -> Moves:
    """Whole parameters are put together on the device, wherever they are stepped."""
    whole, wide, narrow = group.whole, group.wide.itemsize, group.slice.itemsize
    if whole is not None and not all(tier.near for _, tier in group.placement.optimizer):
        yield "to_device", group.shard_numel * (narrow + wide) + whole.numel * wide
        yield "to_host", whole.numel * (narrow + wide) + group.shard_numel * wide
