"""The user's optimizer over this rank's shards.

The optimizer object stays: schedulers, hooks and hyper-parameters keep working on its param_groups. Its
parameters become *pieces*: views of the fp32 masters, one for each model parameter that a sub-group of this
rank has a part of (in the parameter's shape if that part is the whole). Adam, AdamW, SGD and Lion run as one
kernel call per flat sub-group, straight from the 16-bit gradient; their per-piece state consists of views of
the flat state, so `optimizer.state` looks as it does in torch. Every other optimizer steps its pieces itself:
slices or, if it looks at more than single elements, whole parameters, each on one rank.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelz import HOST
from zero.communication.communicator import Communicator
from zero.config.offload import Tier
from zero.errors import OptimizerError, UsageError
from zero.gradients.group_gradients import GroupGradients
from zero.gradients.stand_in import PieceGradient, StandIns
from zero.optimizer.group_step import Factors, GroupStep, plan_step
from zero.optimizer.installed import InstalledPieces
from zero.optimizer.joint import JointOptimizer, members, name_of
from zero.optimizer.kernel_rules import Rule, is_wrapped, rule_for
from zero.optimizer.own_step import OwnStep
from zero.optimizer.owned import OwnedSubGroup, StepCount, Turn
from zero.optimizer.pieces import own
from zero.optimizer.record_streamer import RecordStreamer
from zero.optimizer.refused_calls import refuse_calls
from zero.optimizer.stepping import GroupStepping
from zero.sharding.flat_group import FlatGroup
from zero.tiers.record import Opened
from zero.tiers.room import room_for
from zero.tiers.stores import Stores
from zero.tiers.tracer import Tracer
from zero.tiers.values import lasting


class ShardedOptimizer:
    """Steps the masters of all trainable groups and refreshes the 16-bit shards.

    stepping: how each group is stepped.
    tracer: told when a kernel has stepped a sub-group; see also `OwnStep`.
    owned, subs: the sub-groups, by group, and all in order.
    visits: of the records that come to the device for their step.
    held_back: whether optimizers that step themselves took no part in the last step, because its gradients
        overflowed: the state that they keep may not exist yet.
    stand_ins: what stands for the gradients of pieces until the hooks before the step are over.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[FlatGroup],
        param_group_of: dict[nn.Parameter, int],
        stores: Stores,
        communicator: Communicator,
        stepping: Mapping[FlatGroup, GroupStepping],
        tracer: Tracer,
    ) -> None:
        self.optimizer = optimizer
        self._stores = stores
        self._accelerator = stores.accelerator
        self._tracer = tracer
        own_steps = [each for each in members(optimizer) if rule_for(each) is None]
        self._served = [each for each in members(optimizer) if rule_for(each) is not None]
        self._own_step = OwnStep(own_steps, stores, communicator, tracer) if own_steps else None
        rules = {group: stepping[group].rule for group in groups}
        self._rules = {
            param_group_of[p]: rule
            for group, rule in rules.items()
            for p in group.parameters
            if rule is not None and p in param_group_of
        }
        self.owned = {group: own(group, param_group_of, stepping[group]) for group in groups}
        self.subs = [owned for subs in self.owned.values() for owned in subs]
        self._installed = InstalledPieces(optimizer, self.subs)
        self.record_streamer = RecordStreamer(stores, self.subs, self._installed.show)
        self.held_back = False
        self.stand_ins = StandIns(PieceGradient)
        self._in_step = False
        if isinstance(optimizer, JointOptimizer):
            optimizer.share_state()
        self._installed.install()
        for owned in self.subs:
            if owned.rule is not None:
                with self._room("for the optimizer state of", owned):
                    self._make_state(owned, owned.rule)
        for each in {optimizer, *members(optimizer)}:
            each.register_step_pre_hook(_callers_check(self))
            refuse_calls(each)

    def step(self, gradients: Sequence[GroupGradients], scale: Tensor | None, skip: Tensor | None) -> None:
        """Make one optimizer step. scale: 0-dim factor on the gradients. skip: 0-dim; with 1.0 the step
        changes nothing."""
        turns = [(owned, g) for g in gradients if g.slice.present for owned in self.owned[g.group]]
        step = partial(self._step, turns, scale, skip)
        self._in_step = True
        try:
            if isinstance(self.optimizer, JointOptimizer):
                _between_hooks([self.optimizer], step)
            else:
                step()
        finally:
            self._in_step = False
            self.stand_ins.hide()
        self.deliver_changed()  # by hooks after the step

    @property
    def has_state_of_its_own(self) -> bool:
        """Whether optimizers that step themselves have made their state, in the last step or before."""
        return self._own_step is not None and not self.held_back

    def snapshot_versions(self) -> None:
        """See `InstalledPieces.snapshot`."""
        self._installed.snapshot()

    def changed(self) -> dict[OwnedSubGroup, list[str]]:
        """See `InstalledPieces.changed`."""
        return self._installed.changed()

    def deliver_changed(self) -> None:
        """Send the masters of `changed` sub-groups on to the weights. A step itself delivers those that it
        changes."""
        for owned in self.changed():
            self.record_streamer.return_to_host(owned.sub)
            self._stores.weight_writer(owned.sub.shard, owned.sub.kept.opened().master).deliver_master()

    def _step(self, turns: Sequence[Turn], scale: Tensor | None, skip: Tensor | None) -> None:
        self.held_back = self._own_step is not None and skip is not None and bool(skip)
        if self._own_step is not None and not self.held_back:  # skipping these is decided on the host
            mine = [(owned, have) for owned, have in turns if owned.rule is None]
            self._own_step.run(mine, scale)
            self._installed.snapshot(owned for owned, _ in mine)
        served = [(owned, have) for owned, have in turns if owned.rule is not None]
        _between_hooks(self._served, partial(self._kernel_step, served, Factors(scale, skip)))

    def _kernel_step(self, present: Sequence[Turn], factors: Factors) -> None:
        self.stand_ins.hide()
        away = factors.to(HOST) if any(map(self._is_stepped_by_host, self.subs)) else factors
        with closing(self._in_turn([owned for owned, _ in present])) as turns:
            for (owned, have), state in zip(present, turns, strict=True):
                assert owned.rule is not None
                step = plan_step(owned.rule, self.optimizer.param_groups, owned, have.used)
                here = factors if state.master.device == self._accelerator.device else away
                with self._room("for the step of", owned):
                    self._step_sub_group(owned, have, state, step, here)
                owned.remember(step.missed)
                self._tracer.mark("step", owned.group.unit)

    def _in_turn(self, subs: Sequence[OwnedSubGroup]) -> Generator[Opened, None, None]:
        """Each sub-group's record in memory, in turn: read from disk through the pipeline, streamed from the
        host to the device, or where it is."""
        stored = self._stores.pipeline.through([o.sub.kept for o in subs if o.sub.kept.tier == "disk"])
        streaming = self.record_streamer.in_turn([o for o in subs if o.sub in self.record_streamer])
        with closing(stored) as read, closing(streaming) as streamed:
            for owned in subs:
                record = owned.sub.kept
                if owned.sub in self.record_streamer:
                    yield next(streamed)
                else:
                    yield next(read) if record.tier == "disk" else record.opened()
            for _ in itertools.chain(read, streamed):  # asking once more ends the last turn
                raise AssertionError("a record that no sub-group has")

    def _is_stepped_by_host(self, owned: OwnedSubGroup) -> bool:
        away = owned.sub.kept.tier != "device" and owned.sub not in self.record_streamer
        return away and owned.rule is not None

    def _room(self, purpose: str, owned: OwnedSubGroup) -> AbstractContextManager[None]:
        return room_for(self._accelerator, purpose, owned.group.unit, 4 * owned.sub.numel)

    def first_pieces_of(self, gradients: Sequence[GroupGradients]) -> Iterable[nn.Parameter]:
        """One piece in each param_group, of a parameter that has a gradient."""
        return self._installed.first_of(
            (owned, each) for each in gradients for owned in self.owned[each.group]
        )

    def check_groups(self) -> None:
        """Raise OptimizerError if param_groups have gained or lost parameters since the engine took them
        over, or have got options that their kernels lack, or if the step of an optimizer was replaced, which
        kernels would not call.
        """
        if wrapped := [each for each in self._served if is_wrapped(each)]:
            raise OptimizerError(
                f"the step of {name_of(*wrapped)} was replaced after zero.initialize, but a kernel steps it "
                "and would not call the replacement: replace it before zero.initialize"
            )
        if not self._installed.complete:
            raise OptimizerError(
                "the optimizer's param_groups have different parameters than at zero.initialize; give it all "
                "parameters before that, and change only hyper-parameters later"
            )
        for index in self._rules:
            self.check_options(index, self.optimizer.param_groups[index])

    def check_options(self, index: int, options: Mapping[str, Any]) -> None:
        """Raise OptimizerError if param_group `index` has a kernel that lacks one of these options."""
        if index in self._rules:
            self._rules[index].options(options)

    def move(self, owned: OwnedSubGroup, tier: Tier) -> None:
        """Move a record between device memory and host memory; one on disk stays there."""
        self._move(owned, self._stores.resolve(tier), streamed=False)

    def offload_state(self) -> None:
        """Move all records to the host; those on disk stay there."""
        for owned in self.subs:
            self.move(owned, "host")

    def reload_state(self) -> None:
        """Move all records to where they belong."""
        for owned in self.subs:
            self._move(owned, owned.sub.tier, owned.sub.streamed)

    @lasting()
    def _move(self, owned: OwnedSubGroup, tier: Tier, streamed: bool) -> None:
        sub = owned.sub
        if sub.kept.tier == "disk":
            return
        self.record_streamer.return_to_host(sub)  # in place of one on the device
        old = sub.kept
        with self._room("for the optimizer state of", owned):
            new = self._stores.moved(old, tier, sub.shard, streamed)
            if new.tier == old.tier and new.master is old.master:
                return
            there = new.opened().master.device
            device = self._accelerator.device if streamed else there
            steps = None if owned.count is None else owned.count.steps.to(device)
            own_state = self._installed.own_state_on(owned, there)
        sub.record = new  # only now that there is room for all of it
        if owned.count is not None and steps is not None:
            owned.count.steps = steps
        self._installed.show(owned)
        self._installed.take_own_state(own_state)

    def moments_bytes(self, owned: OwnedSubGroup) -> int:
        """Bytes of a sub-group's state besides the master, wherever it is."""
        moments = sum(m.numel() * m.element_size() for m in owned.sub.kept.moments)
        return moments + sum(value.nbytes for value in self._installed.own_state([owned]))

    def step_bytes(self, subs: Sequence[OwnedSubGroup]) -> int:
        """Bytes that these records, which no kernel steps, are stepped with on the device; see
        `OwnStep.bytes_for`."""
        return 0 if self._own_step is None else self._own_step.bytes_for(subs)

    def own_state_bytes(self) -> int:
        """Bytes of the device in use for state besides the groups' records: for streamed ones, and for what
        the user's optimizer itself keeps, or steps."""
        if self._own_step is None:
            return self.record_streamer.device_bytes()
        values, device = self._installed.own_state(self.subs), self._accelerator.device
        near = sum(value.nbytes for value in values if value.device == device)
        return self.record_streamer.device_bytes() + near + self._own_step.value_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the device in use for fp32 gradients that the user's optimizer steps with."""
        return 0 if self._own_step is None else self._own_step.gradient_bytes

    def _make_state(self, owned: OwnedSubGroup, rule: Rule) -> None:
        record = owned.sub.kept
        self._stores.make_moments(record, len(rule.moments))
        device = record.master.device if isinstance(record.master, Tensor) else HOST
        device = self._accelerator.device if owned.sub in self.record_streamer else device
        owned.count = StepCount(torch.zeros(len(owned.pieces), dtype=torch.float32, device=device))
        self._installed.show_state(owned, rule)

    def _step_sub_group(
        self, owned: OwnedSubGroup, have: GroupGradients, state: Opened, step: GroupStep, factors: Factors
    ) -> None:
        sub, device = owned.sub, state.master.device
        gradient = sub.of(have.slice.get()).to(device)
        writer = self._stores.weight_writer(state.master if sub.shard_serves else sub.shard, state.master)
        kernels = self._stores.kernels(device)
        step.run(kernels, state, owned.counted.steps, gradient, factors, writer.narrow)
        writer.deliver(step.written, factors.skip)


def _between_hooks(optimizers: Sequence[Optimizer], step: Callable[[], None]) -> None:
    """Run `step` inside torch's own wrapper of each optimizer's step: with its hooks and profiler range."""
    if not optimizers:
        step()
        return
    first, *others = optimizers

    def inside(optimizer: Optimizer) -> None:
        _between_hooks(others, step)
        setattr(optimizer, "_opt_called", True)  # noqa: B010 (what torch's schedulers look at)

    Optimizer.profile_hook_step(inside)(first)


def _callers_check(sharded: ShardedOptimizer) -> Callable[..., None]:
    """Make the user's optimizer refuse steps other than the engine's. It must not hold what holds it."""
    found = weakref.ref(sharded)

    def check_caller(*_: Any) -> None:
        alive = found()
        if alive is None or not alive._in_step:
            raise UsageError(
                "optimizer.step() was called directly and would change nothing: call engine.step() instead"
            )

    return check_caller
