"""Gradients on their way from autograd to this rank's slice.

Each trainable group has a whole flat gradient buffer while its backward runs. A parameter's gradient is
written into it once, as soon as autograd has accumulated it. When a group is complete, its buffer is
reduce-scattered (all-reduced, for replicated groups) and its bytes are dropped. What stays is this rank's
slice of the *sum* over ranks. Averaging, unscaling and clipping are one factor, which the optimizer applies.

Buffers are reduced in one fixed order, so that ranks whose graphs differ (a module used on one rank only)
still issue the same collectives. With several ranks, a buffer waits until the backward of its unit's calls is
over, even if all its gradients have come: all ranks see that end at the same point, and ranks with different
orders of gathers and reductions would wait for one another. Where several compiled graphs run in one
backward, each is a round of reductions, in the same order. What is still incomplete at the end of the
backward is agreed on over host memory: a parameter that no rank used has no gradient and is not stepped, as
with `grad = None`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelz import HOST, FlatBuffer
from zero.communication.communicator import Communicator, NamedHandle
from zero.gradients.group_gradients import GradientPolicy, GroupGradients
from zero.gradients.replica_sums import ReplicaSums
from zero.gradients.skipped_steps import SkippedSteps
from zero.ranges import ranged
from zero.sharding.sharded_unit import ShardedUnit
from zero.sharding.units import PERSISTENT, ROOT
from zero.tiers.room import allocate
from zero.tiers.stores import Stores
from zero.tiers.values import Values

UNDER_REDUCTION = 1  # units whose reduction is not waited for until the next unit's is issued


@dataclass
class _Reduction:
    gradients: GroupGradients
    whole: FlatBuffer
    result: Tensor
    handle: NamedHandle | None


@dataclass(eq=False, repr=False)
class GradientReducer:
    """All trainable groups' gradients, reduced in a fixed order while backward runs.

    settings(): see `Communicator.agree`; called at the end of a backward. skipped_steps: searches gradients
    when it has to say which overflow; None without a loss scale.
    """

    units: InitVar[Sequence[ShardedUnit]]
    stores: Stores
    communicator: Communicator
    policy: GradientPolicy
    settings: Callable[[], Mapping[str, Any]]
    skipped_steps: SkippedSteps | None

    def __post_init__(self, units: Sequence[ShardedUnit]) -> None:
        self.all: tuple[GroupGradients, ...] = tuple(
            GroupGradients(group, unit, self.stores, self.policy)
            for unit in units
            for group in unit.groups
            if group.trainable
        )
        self._by_unit: dict[ShardedUnit, list[GroupGradients]] = {}
        for gradients in self.all:
            self._by_unit.setdefault(gradients.unit, []).append(gradients)
        # Backward runs through the units from the last to the first; the root unit ends it.
        ends = [g for g in self.all if g.unit.name in (ROOT, PERSISTENT)]
        self._order = [*(g for g in reversed(self.all) if g not in ends), *ends]
        self._order_known = False
        self._observed: list[GroupGradients] = []
        self._next = 0
        self._communicate = True
        self._last = True
        self._reductions: list[_Reduction] = []
        self._alone = self.communicator.group.size == 1
        self._by_times: dict[int, list[GroupGradients]] = {}  # how many ranks have the same slices
        for gradients in self.all:
            self._by_times.setdefault(gradients.times, []).append(gradients)
        several = any(gradients.group.mesh.replicas is not None for gradients in self.all)
        self._replica_sums = ReplicaSums(self.communicator) if several else None

    def begin_backward(self, last: bool) -> None:
        """A backward starts. last: whether it is the last of the micro-batches before the optimizer step."""
        self._last = last
        self._communicate = last or not self.policy.local
        self._next = 0
        self._observed.clear()
        for gradients in self.all:
            with self.communicator.postponing_disk_errors():
                gradients.begin_backward(last)

    def completes_unit(self, gradients: GroupGradients) -> bool:
        """A group has all its gradients; with no other ranks, it is reduced. Returns whether every trainable
        parameter of the unit has its gradient."""
        if self._alone:
            self.close([gradients])
        return all(each.full for each in self.of_unit(gradients.unit))

    def of_unit(self, unit: ShardedUnit) -> Sequence[GroupGradients]:
        """The gradients of a unit's trainable groups."""
        return self._by_unit.get(unit, ())

    def close(self, closing: Iterable[GroupGradients]) -> None:
        """None of these groups' parameters will get another gradient: reduce what is complete."""
        for gradients in closing:
            if not gradients.closed:
                gradients.closed = True
                self._observed.append(gradients)
        while self._communicate and self._next < len(self._order) and self._order[self._next].closed:
            self._reduce(self._order[self._next])
            self._next += 1

    def close_in_graph(self, unit: ShardedUnit) -> None:
        """Close what one compiled graph has of the unit, where several graphs may run in one backward.

        All ranks that gather a unit run the same graphs: once all groups are reduced, another round begins.
        """
        mine = self.of_unit(unit)
        again = self._next == len(self._order) and any(g.closed and g.filled for g in mine)
        if again and not (unit.resident or self._replica_sums):
            self._next = 0
            for gradients in self.all:
                gradients.begin_round()
        self.close(mine)

    def finish_backward(self, agree: bool) -> None:
        """Reduce what is left. agree: also `agree_on_usage`, without which no step may follow.

        Every group is reduced, used or not: a rank cannot know what the others used before it has issued the
        reductions that they may be waiting in. For the same reason, gradients that came to a group after its
        reduction wait for the next micro-batch's, or until all ranks know of them.
        """
        if not self._communicate:
            return
        self._reduce_all([g for g in self._order if not g.reduced and (g.filled or not self._alone)])
        self._learn_order()
        if agree:
            self.agree_on_usage(self._last)

    def agree_on_usage(self, last: bool = True) -> None:
        """Agree with the other ranks on which parameters were used, and reduce the gradients that came late,
        which before the last micro-batch wait for the next one's. Collective."""
        late = self._used_and_late()
        if late and last:
            for gradients in late:
                with self.communicator.postponing_disk_errors():
                    gradients.keep_late()
            self._reduce_all(late)
            self.communicator.agree()

    @property
    def same_everywhere(self) -> bool:
        """Whether every rank of the job has all that there is of every group's gradients. The same on all
        ranks: one that has no gradients at all may be a stage beside others that have some."""
        return set(self._by_times) <= {self.communicator.whole.size} and (
            bool(self._by_times) or not self.communicator.divided
        )

    def norm_and_nonfinite(self) -> Tensor:
        """(2,) fp32 on the device: this rank's share of the sum of squares of all gradients, and of how many
        are not finite. A slice that several ranks have is divided among them, so that the sum over the job
        has each element once.

        Raises OutOfMemoryError, having changed nothing.
        """
        chunk = self.stores.accelerator.kernels.chunk
        largest = max((gradients.group.layout.shard_numel for gradients in self.all), default=0)
        wanted = 4 * min(largest, chunk)  # what the torch references take to widen 16-bit values
        return allocate(self.stores, "for the norm of the gradients", None, wanted, self._share_of_norm)

    def _share_of_norm(self) -> Tensor:
        device = self.stores.accelerator.device
        total: Tensor | None = None
        for times, gradients in self._by_times.items():
            found = self._norm(gradients)
            if times > 1 and not self.same_everywhere:
                found /= times
            total = found if total is None else total + found
        return torch.zeros(2, dtype=torch.float32, device=device) if total is None else total

    def _norm(self, having: Iterable[GroupGradients]) -> Tensor:
        """One call for all slices on the device. Those elsewhere are taken one by one on the host, from
        whatever tier: where they lie does not change the norm."""
        device = self.stores.accelerator.device
        near: list[Tensor] = []
        far: list[Values] = []
        for gradients in having:
            if gradients.slice.present:
                values = gradients.slice.get()
                if device.type != HOST.type and isinstance(values, Tensor) and values.device == device:
                    near.append(values)
                else:
                    far.append(values)
        if not near:
            return self._norm_on_host(far).to(device)
        result = self.stores.kernels(device).norm_and_nonfinite(near)
        return result + self._norm_on_host(far).to(device) if far else result

    def norms_of(self, parts: Sequence[Tensor], order: float) -> Tensor:
        """The norm of each of these flat tensors, which are on one device: (parts,), fp32.

        On the host, a kernel takes a third of the time of torch's function for 16-bit values.
        """
        if order == 2.0 and parts[0].device.type == HOST.type:
            kernels = self.stores.kernels(parts[0].device)
            return torch.stack([kernels.norm_and_nonfinite([part])[0] for part in parts]).sqrt_()
        return torch.stack(torch._foreach_norm(list(parts), order, dtype=torch.float32))

    def _norm_on_host(self, slices: Sequence[Values]) -> Tensor:
        """One slice after another, so that those on disk are not in memory all at once."""
        kernels = self.stores.kernels(HOST)
        total = torch.zeros(2, dtype=torch.float64, device=HOST)
        for values in slices:
            with self.communicator.postponing_disk_errors():
                total += kernels.norm_and_nonfinite([values.to(HOST)])
        result = total.float()
        result[1] += ~torch.isfinite(result[0])  # squares that overflow count as infinite
        return result

    def land(self) -> None:
        """Wait for gradients that are on their way to the host."""
        for gradients in self.all:
            gradients.slice.find()

    def device_bytes(self) -> int:
        """Bytes of the device in use for whole buffers and slices."""
        flying = sum(
            (0 if r.gradients.is_kept(r.whole) else r.whole.nbytes)
            + (0 if r.result is r.whole.data else r.result.nbytes)
            for r in self._reductions
        )
        flying += 0 if self._replica_sums is None else self._replica_sums.device_bytes()
        return flying + sum(gradients.device_bytes() for gradients in self.all)

    def clear(self) -> None:
        """Drop all gradients: after the optimizer step, or after an exception. After a failed collective they
        stay while the engine does."""
        if self.communicator.failed:
            return  # transfers that cannot be waited for may still write to them
        for reduction in self._reductions:
            if reduction.handle is not None:
                reduction.handle.wait()
        self._reductions.clear()
        if self._replica_sums is not None:
            self._replica_sums.clear()
        for gradients in self.all:
            gradients.clear()

    def leave_device(self) -> None:
        """Drop the memory of gradients that stays from one step to the next, between steps."""
        for gradients in self.all:
            gradients.leave_device()

    def _reduce(self, gradients: GroupGradients) -> None:
        gradients.seal()
        while any(r.gradients is gradients and gradients.is_kept(r.whole) for r in self._reductions):
            self._wait_oldest()  # what is under way is about to be added to
        whole = gradients.detach_whole()
        data = whole.data
        if self.skipped_steps is not None and self.skipped_steps.searching:
            self.skipped_steps.search(gradients, data)
        group, unit, ranks = gradients.group, gradients.unit.name, gradients.group.mesh.shards
        result, handle = data, None
        with ranged("reduce", unit):
            if group.shards > 1:
                result = gradients.empty_slice(data.dtype)
                handle = self.communicator.reduce_scatter(unit, result, data, ranks)
            elif ranks.size > 1:
                handle = self.communicator.all_reduce(unit, data, ranks)
        self._reductions.append(_Reduction(gradients, whole, result, handle))
        while len({r.gradients.unit for r in self._reductions}) > UNDER_REDUCTION:
            self._wait_oldest()

    def _reduce_all(self, which: Iterable[GroupGradients]) -> None:
        for gradients in which:
            self._reduce(gradients)
        while self._reductions:
            self._wait_oldest()
        if self._replica_sums is not None:
            self._replica_sums.finish()

    def _wait_oldest(self) -> None:
        done = self._reductions.pop(0)
        with ranged("reduced", done.gradients.unit.name):
            if done.handle is not None:
                done.handle.wait()
        if self._replica_sums is not None and done.gradients.group.mesh.replicas is not None:
            self._replica_sums.take(done.gradients, done.whole, done.result, self._last)
            return
        with self.communicator.postponing_disk_errors():
            done.gradients.store_reduced(done.whole, done.result)

    def summed(self, gradients: GroupGradients) -> Values:
        """Collective. The slice of a group that has one, as the sum over all ranks at this moment."""
        sums = None if gradients.group.mesh.replicas is None else self._replica_sums
        total = None if sums is None else sums.of_all(gradients)
        return gradients.slice.get() if total is None else total

    def used(self) -> list[nn.Parameter]:
        """Parameters that have had a gradient on any rank since the last step."""
        return [gradients.group.parameters[index] for gradients in self.all for index in gradients.used]

    def _used_and_late(self) -> list[GroupGradients]:
        """Note which parameters have a gradient on any rank.

        Returns the groups, in the order of reductions, that got gradients on some rank after they had been
        reduced.
        """
        counts = [len(g.group.parameters) for g in self.all]
        late: list[int] = []
        if self.communicator.agree(any(g.partial or g.filled for g in self.all), self.settings):
            mine = torch.cat([_flags(g.locally_used, n) for g, n in zip(self.all, counts, strict=True)])
            after = torch.tensor([bool(g.filled) for g in self._order], dtype=torch.uint8, device=HOST)
            *flags, after = self.communicator.highest("usage", torch.cat([mine, after])).split(
                [*counts, len(after)]
            )
            used = [f.nonzero().flatten().tolist() for f in flags]
            late = after.nonzero().flatten().tolist()
        else:
            used = [range(n) for n in counts]
        for gradients, indices in zip(self.all, used, strict=True):
            gradients.used.update(indices)
            gradients.locally_used.clear()
        return [self._order[i] for i in late]

    def _learn_order(self) -> None:
        """After the first backward, take rank 0's order of completion for all later ones."""
        if self._order_known:
            return
        self._order_known = True
        place = {g: i for i, g in enumerate(self.all)}
        seen = list(dict.fromkeys(self._observed))
        numbers = [place[g] for g in (*seen, *(g for g in self._order if g not in seen))]
        order = torch.tensor(numbers, device=HOST)
        if self.communicator.group.size > 1:
            self.communicator.broadcast("gradient order", order, 0)
        self._order = [self.all[i] for i in order.tolist()]


def _flags(indices: Iterable[int], count: int) -> Tensor:
    flags = torch.zeros(count, dtype=torch.uint8, device=HOST)
    flags[list(indices)] = 1
    return flags
