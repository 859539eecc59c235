"""What training keeps in each memory, with activations where a batch is given; without buffers of modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zero.config.training import Config
from zero.gradients.group_gradients import GradientPolicy
from zero.planning.activations import Activations
from zero.planning.groups import PlannedGroup, PlannedUnit
from zero.planning.peaks import Sums, backward, before_step, building, forward, step
from zero.tiers.device_bytes import DeviceBytes
from zero.tiers.pipeline import BUFFERS
from zero.tiers.tier import ON_DEVICE, TIERS, Tier
from zero.tiers.values import Column


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank.

    rest: between steps, by name of the tier. gradients: what is left of them from backward to step, likewise.
    buffers: of the host, through which records on disk pass. peaks: of the device, by phase. activations:
    what is there at these peaks besides model state, by phase; empty where no batch was given.
    """

    rest: dict[str, DeviceBytes]
    gradients: dict[str, int]
    buffers: int
    peaks: dict[str, DeviceBytes]
    activations: dict[str, int]

    @property
    def device(self) -> int:
        """The highest peak."""
        return max(map(self.total, self.peaks))

    def total(self, phase: str) -> int:
        """The peak of a phase, with activations."""
        return self.peaks[phase].total + self.activations.get(phase, 0)

    @property
    def host(self) -> int:
        return self.buffers + sum(self._bytes_in(tier) for tier in TIERS if tier.in_host_memory)

    @property
    def disk(self) -> int:
        return sum(self._bytes_in(tier) for tier in TIERS if tier.stored)

    def _bytes_in(self, tier: Tier) -> int:
        return self.rest[tier.name].total + self.gradients[tier.name]


def plan_memory(
    units: Sequence[PlannedUnit],
    config: Config,
    policy: GradientPolicy,
    scaled: bool,
    replicas: int,
    activations: Activations | None = None,
) -> MemoryPlan:
    """Plan one rank's memory. scaled: whether gradients are averaged, unscaled or clipped. replicas: their
    number, of the model."""
    live = activations or Activations()
    sums = _sums(policy, replicas)
    groups = [group for unit in units for group in unit.groups]
    rest = {tier.name: sum((_rest(g, tier) for g in groups), DeviceBytes()) for tier in TIERS}
    made = sum((_rest(g.before_steps, ON_DEVICE) for g in groups), DeviceBytes())
    gradients = {
        tier.name: sum(
            tier.nbytes(g.shard_numel, Column(g.slice))
            for g in groups
            if g.trainable and g.placement.gradients is tier
        )
        for tier in TIERS
    }
    forwards = _with_activations(forward(units, config.prefetch, sums), live.forward)
    backwards = _with_activations(backward(units, config, sums, replicas), live.backward)
    peaks = {
        "init": _highest([*building(units), made]),
        "forward": forwards[0],
        "backward": backwards[0],
        "step": _highest([step(units, scaled), before_step(units, sums)]),
    }
    peaks = {phase: rest[ON_DEVICE.name] + held if phase != "init" else held for phase, held in peaks.items()}
    alive = {"forward": forwards[1], "backward": backwards[1]} if activations else {}
    return MemoryPlan(rest, gradients, _buffers(groups), peaks, alive)


def _with_activations(
    points: Iterable[tuple[str | None, DeviceBytes]], alive: Mapping[str | None, int]
) -> tuple[DeviceBytes, int]:
    """The highest point, and the activations there."""
    found = ((held, alive.get(where, 0)) for where, held in points)
    return max(found, key=lambda both: both[0].total + both[1], default=(DeviceBytes(), 0))


def _sums(policy: GradientPolicy, replicas: int) -> Sums:
    """What other micro-batches make the device hold. One alone is planned where their number is open."""
    if policy.sums:
        return "whole" if policy.local else "slices"
    if policy.keeps_whole:
        return "kept whole"
    return "kept slices" if policy.open and policy.fixed_tiers and replicas > 1 else "none"


def _highest(points: Iterable[DeviceBytes]) -> DeviceBytes:
    return max(points, key=lambda held: held.total, default=DeviceBytes())


def _rest(group: PlannedGroup, tier: Tier) -> DeviceBytes:
    """What a group keeps in one tier between steps."""
    numel = group.numel if group.resident else group.shard_numel
    return DeviceBytes(
        parameters=tier.nbytes(numel, Column(group.dtype)) if group.placement.params is tier else 0,
        gradients=group.room if tier.near else 0,
        optimizer=sum(group.record_bytes(n, tier) for n, t in group.placement.optimizer if t is tier),
    )


def _buffers(groups: Sequence[PlannedGroup]) -> int:
    """Host memory for records on their way from the disk and back."""
    sizes = (
        group.record_bytes(numel, tier)
        for group in groups
        for numel, tier in group.placement.optimizer
        if tier.stored
    )
    return BUFFERS * max(sizes, default=0)
