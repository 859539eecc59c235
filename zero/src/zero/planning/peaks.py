"""The device's highest points in a step: model state alone, on top of what is there between steps.

A step in steady state is played through, unit by unit, as hooks and reducer would run it: the root around
everything, a window of units gathered ahead, and whole gradients of the unit that backward is in and of the
one under reduction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zero.communication.quantised import Quantised
from zero.config.training import Config
from zero.gradients.reducer import UNDER_REDUCTION
from zero.gradients.replica_sums import REPLICA_SUMS_IN_FLIGHT
from zero.optimizer.record_streamer import STREAM_WINDOW
from zero.planning.activations import HEAD
from zero.planning.groups import PlannedGroup, PlannedUnit
from zero.planning.order import backward_uses, end
from zero.tiers.carrier import LEAVING
from zero.tiers.device_bytes import DeviceBytes
from zero.tiers.tier import ON_DEVICE

TRAVELLING = LEAVING + 1
"""Units whose gradients may be on their way to the host, including one that is just setting out."""
Sums = Literal["none", "slices", "whole", "kept whole", "kept slices"]
"""What earlier micro-batches have left: nothing, reduced slices, or whole buffers. Kept: nothing, but what
later ones would add to stays until the step, as it was before its reduction, or its sum over replicas."""


def building(units: Sequence[PlannedUnit]) -> Iterator[DeviceBytes]:
    """The points of `zero.initialize`, for a model whose parameters are on the host or under `zero.init`."""
    done = DeviceBytes()
    for unit in units:
        yield replace(done, gathered=_flattening(unit))
        for group in unit.groups:
            parameters = group.own_bytes if group.resident else group.shard_bytes
            near = parameters if group.placement.params.near else 0
            done += DeviceBytes(parameters=near, optimizer=_masters(group))


def _flattening(unit: PlannedUnit) -> int:
    """The most bytes that a unit takes while it is built: its values as they were given, the masters made
    from them, the narrower values, the shard."""
    now = most = sum(group.numel * group.given.itemsize for group in unit.groups)
    for group in unit.groups:
        now += _masters(group)
        most = max(most, now)
        if group.given is not group.dtype:
            most = max(most, now + group.own_bytes)
            now += group.own_bytes - group.numel * group.given.itemsize
        if not group.resident:
            shard = group.shard_bytes if group.placement.params.near else 0
            most = max(most, now + shard)
            now += shard - group.own_bytes
    return most


def _masters(group: PlannedGroup) -> int:
    """Bytes of masters on the device besides the shard."""
    near = [numel for numel, tier in group.placement.optimizer if tier.near]
    return 0 if group.is_master(ON_DEVICE) else sum(near) * group.placement.master.itemsize


def forward(
    units: Sequence[PlannedUnit], prefetch: int, sums: Sums
) -> Iterator[tuple[str | None, DeviceBytes]]:
    """What is gathered, by name of the block (None: before all, HEAD: after them), and the gradients of
    earlier micro-batches."""
    order = [unit for unit in units if not unit.is_root]
    groups = [group for unit in units for group in unit.groups if group.trainable]
    near = [group for group in groups if group.placement.gradients.near]
    gradients = sum(g.slice_bytes - g.room for g in near) if sums == "slices" else 0
    gradients += sum(_beside_room(g) for g in groups) if sums == "whole" else 0
    yield None, DeviceBytes(gathered=_window([u for u in units if u.is_root], []), gradients=gradients)
    for index, unit in enumerate(order):
        ahead = [later for later in order[index + 1 :] if later.gathered][:prefetch]
        gathered = _gathered_at(units, unit, ahead)
        yield unit.name, DeviceBytes(gathered=gathered, gradients=gradients)
    if order:  # the last block stays for the backward
        yield HEAD, DeviceBytes(gathered=_gathered_at(units, order[-1], []), gradients=gradients)


def _beside_room(group: PlannedGroup) -> int:
    """Bytes of a whole buffer of gradients that is there with all its gradients."""
    return group.gradient_bytes - (group.room if group.reduced_in_place else 0)


def _gathered_at(units: Sequence[PlannedUnit], unit: PlannedUnit, ahead: Sequence[PlannedUnit]) -> int:
    around = [u for u in units if u.contains(unit) and u is not unit]
    return _window([unit, *around], [u for u in ahead if u not in around])


def _window(used: Sequence[PlannedUnit], ahead: Sequence[PlannedUnit]) -> int:
    """Bytes of units that are computed with, and of those on their way."""
    whole = sum(group.whole_bytes for unit in used for group in unit.gathered)
    unpacking = max(
        (sum(Quantised.nbytes_of(g.numel) for g in unit.gathered if g.coded) for unit in used[:1]), default=0
    )
    coming = sum(group.travel_bytes for unit in ahead for group in unit.gathered)
    return whole + max(unpacking, coming)


def backward(
    units: Sequence[PlannedUnit], config: Config, sums: Sums, replicas: int
) -> Iterator[tuple[str | None, DeviceBytes]]:
    """The units that a backward comes to, by name, from the last to the first, then the root; before them the
    loss (None), and what the root has after all blocks (HEAD)."""
    turns, uses = _turns(units), backward_uses(units)
    travelling = TRAVELLING + (REPLICA_SUMS_IN_FLIGHT if replicas > 1 else 0)
    roots = [unit for unit in units if unit.is_root]
    coming = [unit for unit in uses if unit.gathered and not unit.is_root]
    gathered = _window(roots, coming[: config.prefetch])
    yield None, DeviceBytes(gathered=gathered, gradients=_before_all(turns, sums))
    largest = max((u.largest for u in roots if any(g.early for g in u.groups)), default=0)
    begun = _gradients(_Moment(-1, False, travelling), turns, sums)
    yield HEAD, DeviceBytes(gathered=gathered, gradients=largest + begun)
    for index, unit in enumerate(turns):
        ahead = [later for later in uses[end(unit, uses) :] if later.gathered]
        gathered = _gathered_at(units, unit, ahead[: config.prefetch])
        for own, moment in _moments(unit, index, turns, travelling):
            gradients = own + _gradients(moment, turns, sums)
            yield unit.name, DeviceBytes(gathered=gathered, gradients=gradients)


def _before_all(turns: Sequence[PlannedUnit], sums: Sums) -> int:
    """Bytes of the gradients of earlier micro-batches, before this one has any."""
    before = _Moment(-len(turns), False, 0)
    groups = (group for unit in turns for group in unit.groups if group.trainable)
    return sum(before.bytes_of(group, 0, False, sums) for group in groups)


def _gradients(moment: _Moment, turns: Sequence[PlannedUnit], sums: Sums) -> int:
    return sum(
        moment.bytes_of(group, *_place(group, position, unit), sums)
        for position, unit in enumerate(turns)
        for group in unit.groups
        if group.trainable
    )


def _turns(units: Sequence[PlannedUnit]) -> list[PlannedUnit]:
    """The order of the backward."""
    blocks = (unit for unit in reversed(units) if unit.reached and not unit.is_root)
    return [*blocks, *(unit for unit in units if unit.is_root)]


def _moments(
    unit: PlannedUnit, index: int, turns: Sequence[PlannedUnit], travelling: int
) -> Iterator[tuple[int, _Moment]]:
    """The moments of a unit's turn, each with the bytes that autograd holds then: while the gradient of its
    largest parameter is put into the whole buffer; when that is reduced, with the gradient that came last;
    and, before both, while gradients of one parameter are added up.
    """
    around = [group for other in turns if other.is_root for group in other.groups if group.trainable]
    held = 0 if unit.is_root else sum(group.held for group in around)
    yield held + unit.largest, _Moment(index, False, travelling)
    yield held + unit.last, _Moment(index, True, travelling)
    for group in unit.groups:
        if group.trainable and group.adding:
            yield held + group.adding, _Moment(index, False, travelling, adding=group)


def _place(group: PlannedGroup, position: int, unit: PlannedUnit) -> tuple[int, bool]:
    """When a group's gradients are complete, and whether the first comes before all others: a head is after
    the embedding in the root, but before the blocks in the backward."""
    if not unit.is_root:
        return position, False
    return (-1 if group.complete_early else position), group.early


@dataclass(frozen=True)
class _Moment:
    """A moment in the turn of the unit at `index`, before or after its gradients are reduced. travelling: how
    many units' gradients may be on their way off the device. adding: the group of the parameter whose
    gradients autograd is adding up.
    """

    index: int
    reduced: bool
    travelling: int
    adding: PlannedGroup | None = None

    def bytes_of(self, group: PlannedGroup, position: int, early: bool, sums: Sums) -> int:
        """Bytes of the gradients of a group whose turn is at `position`. early: whether its first gradient
        comes with the very first of all. The age of gradients is counted in turns since they were complete.
        """
        near, age = group.placement.gradients.near, self.index - position
        kept = sums == "kept slices" and near and age > UNDER_REDUCTION
        in_room = group.room if self._is_in_room(group, age, early, sums) else 0
        return self._bytes_of(group, near, age, early, sums) + (group.slice_bytes if kept else 0) - in_room

    def _is_in_room(self, group: PlannedGroup, age: int, early: bool, sums: Sums) -> bool:
        """Whether what `bytes_of` counts is, in part, in the room of the group's slice."""
        if sums == "slices":
            return True
        if group.reduced_in_place:
            return self._is_begun(group, age, early, sums)
        if group.sent is not group.reduced and sums != "kept whole":
            return age > UNDER_REDUCTION
        return age > 0 or (age == 0 and self.reduced)

    def _bytes_of(self, group: PlannedGroup, near: bool, age: int, early: bool, sums: Sums) -> int:
        begun = self._is_begun(group, age, early, sums)
        if sums == "kept whole":
            return self._kept_whole(group, age, near, begun)
        if group.sent is not group.reduced:
            return self._narrowed(group, age, near, begun)
        if group.reduced_in_place:
            return self._in_place(group, age, near, begun, sums)
        done = age > 0 or (age == 0 and self.reduced)
        adds = sums == "slices" and done and age <= UNDER_REDUCTION  # what is added to the sum
        stays = near and (done or sums == "slices")
        travels = not near and done and age <= self.travelling
        whole = group.gradient_bytes if begun and age <= UNDER_REDUCTION else 0
        added = group.shard_numel * group.reduced.itemsize if adds else 0
        return whole + (group.slice_bytes if stays or travels else 0) + added

    def _is_begun(self, group: PlannedGroup, age: int, early: bool, sums: Sums) -> bool:
        awaited = group is self.adding and not group.begun
        return early or sums == "whole" or age > 0 or (age == 0 and not awaited)

    def _kept_whole(self, group: PlannedGroup, age: int, near: bool, begun: bool) -> int:
        """As `bytes_of`, where the whole buffer stays beside its reduced slice, and so beside what travels if
        that is narrower or is reduced in place."""
        done = age > 0 or (age == 0 and self.reduced)
        whole = group.gradient_bytes if begun else 0
        slice_ = group.slice_bytes if done and (near or age <= self.travelling) else 0
        sent = group.sent_bytes if done and age <= UNDER_REDUCTION and group.sent is not group.reduced else 0
        return whole + slice_ + (sent if group.sharded else 0)

    def _narrowed(self, group: PlannedGroup, age: int, near: bool, begun: bool) -> int:
        """As `bytes_of`, for a group whose gradients are narrowed to be sent: the wide buffer goes at once,
        and the sum is wide."""
        if age < 0 or (age == 0 and not self.reduced):
            return group.gradient_bytes if begun else 0
        if age == 0:
            return group.gradient_bytes + group.sent_bytes
        if age <= UNDER_REDUCTION:
            return group.sent_bytes
        return group.slice_bytes if near or age <= self.travelling else 0

    def _in_place(self, group: PlannedGroup, age: int, near: bool, begun: bool, sums: Sums) -> int:
        """As `bytes_of`, for a group whose reduced gradient is the whole buffer itself."""
        if near and sums == "slices":  # the sum, and what is added to it
            return group.gradient_bytes * (2 if begun and age <= UNDER_REDUCTION else 1)
        return group.gradient_bytes if begun and (near or age <= self.travelling) else 0


def before_step(units: Sequence[PlannedUnit], sums: Sums) -> DeviceBytes:
    """What is kept up to the step beside the slices, and dropped as it begins."""
    groups = [group for unit in units for group in unit.groups if group.trainable]
    near = [group for group in groups if group.placement.gradients.near]
    kept = sum(g.gradient_bytes for g in groups) if sums == "kept whole" else 0
    kept += sum(g.slice_bytes for g in near) if sums == "kept slices" else 0
    return DeviceBytes(gradients=kept + sum(group.slice_bytes - group.room for group in near))


def step(units: Sequence[PlannedUnit], scaled: bool) -> DeviceBytes:
    """What the step takes. Kernels step from the gradients as they are, and streamed records come a few at a
    time; torch's optimizers have everything that they step with at once. The last gradients may still be on
    their way to the host. scaled: whether gradients are multiplied by something.
    """
    turns = _turns(units)
    groups = [(g, age) for age, unit in enumerate(reversed(turns)) for g in unit.groups if g.trainable]
    near = [group for group, _ in groups if group.placement.gradients.near]
    travelling = [g for g, age in groups if not g.placement.gradients.near and age < TRAVELLING]
    gradients = sum(group.slice_bytes - group.room for group in (*near, *travelling))
    gradients += sum(
        _stepped_with(group, numel, scaled)
        for group, _ in groups
        for numel, tier in group.placement.optimizer
        if tier.near and not group.kernel
    )
    streamed = [
        group.record_bytes(numel, tier)
        for group, _ in groups
        for numel, tier in group.placement.optimizer
        if group.placement.comes(tier)
    ]
    gradients += max((_fetched(group) for group, _ in groups if group.kernel), default=0)
    on_the_way = _exchanged([group for group, _ in groups], scaled)
    return DeviceBytes(
        gradients=gradients, optimizer=max(STREAM_WINDOW * max(streamed, default=0), on_the_way)
    )


def _fetched(group: PlannedGroup) -> int:
    """The most bytes of gradients off the device that come back for one record that is stepped there."""
    if group.placement.gradients.near:
        return 0
    there = (n for n, tier in group.placement.optimizer if tier.near or group.placement.streamed)
    return group.slice.itemsize * max(there, default=0)


def _stepped_with(group: PlannedGroup, numel: int, scaled: bool) -> int:
    """Bytes of gradients in fp32; for whole parameters, also of the values."""
    if group.whole is not None:
        return 2 * group.whole.numel * group.wide.itemsize
    return numel * group.wide.itemsize * (scaled or group.slice is not group.wide)


def _exchanged(groups: Sequence[PlannedGroup], scaled: bool) -> int:
    """Bytes of the room in which groups are exchanged, one after another: for the part of a slice that others
    step; and for what comes, unless it comes where it is stepped, and as it is, which blocks never do."""
    parts = arrived = 0
    for group in groups:
        if group.whole is not None:
            wide, near = group.wide.itemsize, all(tier.near for _, tier in group.placement.optimizer)
            narrow = group.slice.itemsize if scaled or group.slice is not group.wide else 0
            direct = near and not group.whole.joins_blocks
            parts = max(parts, wide * group.shard_numel)
            whole = group.whole.numel * (narrow if direct else wide)
            arrived = max(arrived, whole + wide * group.whole.scattered)
    return parts + arrived
