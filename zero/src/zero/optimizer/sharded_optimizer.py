"""The user's optimizer over this rank's shards.

The optimizer object stays: schedulers, hooks and hyper-parameters keep working on its param_groups. Its
parameters become *pieces*: views of the fp32 masters, one for each model parameter that a sub-group of this
rank has a part of (in the parameter's shape if that part is the whole). Optimizers that kernels serve run as
one call per flat sub-group, straight from the 16-bit gradient; their per-piece state consists of views of
the flat state, so `optimizer.state` looks as it does in torch. Every other optimizer steps its pieces itself:
slices or, if it looks at more than single elements, whole parameters, each on one rank.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelz import HOST
from zero.communication.communicator import Communicator
from zero.errors import OptimizerError, UsageError
from zero.gradients.group_gradients import GroupGradients
from zero.optimizer.captured_step import CapturedStep
from zero.optimizer.group_step import Factors, step_sub_group
from zero.optimizer.installed import InstalledPieces
from zero.optimizer.joint import JointOptimizer, members, name_of
from zero.optimizer.kernel_rules import Rule, is_wrapped, rule_for
from zero.optimizer.pieces import stepped_sub_groups
from zero.optimizer.record_streamer import RecordStreamer
from zero.optimizer.self_stepping import SelfStepping
from zero.optimizer.stepped import StepGradients, SteppedSubGroup, Turn
from zero.optimizer.stepping import GroupStepping
from zero.ranges import ranged
from zero.sharding.flat_group import FlatGroup
from zero.tiers.device_bytes import Tracer
from zero.tiers.room import room_for
from zero.tiers.stores import Stores
from zero.tiers.tier import Opened, Tier
from zero.tiers.values import lasting
from zero.tiers.weight_writer import WeightWriter


class ShardedOptimizer:
    """Steps the masters of all trainable groups and refreshes the 16-bit shards.

    stepping: how each trainable group is stepped.
    tracer: told when a kernel has stepped a sub-group; see also `SelfStepping`.
    subs_of, subs: the sub-groups, by group, and all in order. installed: what the optimizer has of them.
    self_stepping: steps those that no kernel does. record_streamer: brings records to the device for theirs.
    captured: makes what kernels do in a step a graph, where the settings ask for it; else None.
    held_back: whether optimizers that step themselves took no part in the last step, because its gradients
        overflowed: the state that they keep may not exist yet.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        param_group_of: dict[nn.Parameter, int],
        stores: Stores,
        communicator: Communicator,
        stepping: Mapping[FlatGroup, GroupStepping],
        tracer: Tracer,
        capture: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self._stores = stores
        self._accelerator = stores.accelerator
        self._tracer = tracer
        self._served = [each for each in members(optimizer) if rule_for(each) is not None]
        unserved = [each for each in members(optimizer) if rule_for(each) is None]
        self.self_stepping = SelfStepping(unserved, stores, communicator, tracer)
        self.subs_of = {
            group: stepped_sub_groups(group, param_group_of, way, communicator)
            for group, way in stepping.items()
        }
        self.subs = [stepped for subs in self.subs_of.values() for stepped in subs]
        rules = [(p, way.rule) for group, way in stepping.items() for p in group.parameters]
        self._rules = {
            param_group_of[p]: rule for p, rule in rules if rule is not None and p in param_group_of
        }
        self.installed = InstalledPieces(optimizer, self.subs_of)
        self.record_streamer = RecordStreamer(stores, self.subs, self.installed.show)
        self.held_back = False
        self.captured = CapturedStep(stores.accelerator, optimizer) if capture else None
        self._param_group_of = param_group_of
        self._having_state: set[Optimizer] = set()
        self._in_step = False
        self.installed.install()
        for stepped in self.subs:
            if stepped.rule is not None:
                with self._room("for the optimizer state of", stepped):
                    self._make_state(stepped, stepped.rule)
        for each in {optimizer, *members(optimizer)}:
            each.register_step_pre_hook(_callers_check(self))

    def of(self, optimizer: Optimizer, gradients: Iterable[GroupGradients]) -> list[StepGradients]:
        """The part of these gradients that one optimizer steps; all, where it is the only one or has joined
        all."""
        every = [StepGradients(have.group, have.used, have.slice) for have in gradients]
        if optimizer is self.optimizer:
            return every
        owned = self._owned(optimizer)
        parts = (replace(have, used=have.used & self._indices_of(have.group, owned)) for have in every)
        return [part for part in parts if part.used]

    def _owned(self, *optimizers: Optimizer) -> set[int]:
        """The indices of the param_groups that these optimizers have."""
        theirs = {id(group) for each in optimizers for group in each.param_groups}
        return {index for index, group in enumerate(self.optimizer.param_groups) if id(group) in theirs}

    def _join_blocks(self, optimizers: Sequence[Optimizer]) -> bool:
        """Whether any of these steps parameters that are put together from blocks: so on all ranks whose
        models are alike."""
        joined = [group for group, subs in self.subs_of.items() if any(s.joins_blocks for s in subs)]
        owned = self._owned(*optimizers) if joined else set()
        return any(self._indices_of(group, owned) for group in joined)

    def _indices_of(self, group: FlatGroup, owned: Container[int]) -> set[int]:
        """The parameters of a group, by index, that are in these param_groups."""
        places = enumerate(group.parameters)
        return {index for index, parameter in places if self._param_group_of.get(parameter) in owned}

    def step(
        self,
        optimizer: Optimizer,
        gradients: Sequence[StepGradients],
        scale: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        """Make one step of an optimizer, or of all that it has joined. gradients: of its parameters. scale:
        0-dim factor on the gradients. skip: 0-dim; with 1.0 the step changes nothing."""
        turns = [(stepped, g) for g in gradients if g.slice.present for stepped in self.subs_of[g.group]]
        step = partial(self._step, members(optimizer), turns, scale, skip)
        self._in_step = True
        try:
            if isinstance(optimizer, JointOptimizer):
                _between_hooks([self.optimizer], step)
            else:
                step()
        finally:
            self._in_step = False
        for each in {optimizer, *members(optimizer)}:
            setattr(each, "_opt_called", True)  # noqa: B010 (what torch's schedulers look at)
        self.deliver_changed()  # by hooks after the step

    @property
    def has_state_beside(self) -> bool:
        """Whether all optimizers that step themselves have made their state, in the last step or before."""
        return bool(self._having_state) and self._having_state >= set(self.self_stepping.optimizers)

    def deliver_changed(self) -> None:
        """Send the masters of sub-groups that were written to outside a step on to the weights."""
        for stepped in self.installed.changed():
            self.record_streamer.return_to_host(stepped.sub)
            WeightWriter(self._stores, stepped.sub.shard, stepped.record.opened()).deliver_master()

    def _step(
        self,
        optimizers: Sequence[Optimizer],
        turns: Sequence[Turn],
        scale: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        unserved = [each for each in optimizers if each not in self._served]
        # Skipping these is decided on the host.
        self.held_back = bool(unserved) and skip is not None and bool(skip)
        if unserved and not self.held_back:
            mine = [(stepped, have) for stepped, have in turns if stepped.rule is None]
            self.self_stepping.run(unserved, mine, scale, self._join_blocks(unserved))
            self.installed.snapshot(stepped for stepped, _ in mine)
            self._having_state.update(unserved)
        served = [(stepped, have) for stepped, have in turns if stepped.rule is not None]
        mine_served = [each for each in optimizers if each in self._served]
        _between_hooks(mine_served, partial(self._kernel_step, served, Factors(scale, skip)))

    def _kernel_step(self, present: Sequence[Turn], factors: Factors) -> None:
        call = partial(self._call_kernels, present, factors)
        call(None) if self.captured is None else self.captured.step(present, factors, call)

    def _call_kernels(self, present: Sequence[Turn], factors: Factors, rates: Tensor | None) -> None:
        host = (o.rule is not None and not (o.record.tier.near or o.sub.streamed) for o in self.subs)
        away = factors.to(HOST) if any(host) else factors
        with closing(self._in_turn([stepped for stepped, _ in present])) as turns:
            for (stepped, have), state in zip(present, turns, strict=True):
                here = factors if state.master.device == self._accelerator.device else away
                with self._room("for the step of", stepped), ranged("update", stepped.group.unit):
                    self._step_sub_group(stepped, have, state, here, rates)
                self._tracer.mark("step", stepped.group.unit)

    def _in_turn(self, subs: Sequence[SteppedSubGroup]) -> Generator[Opened, None, None]:
        """Each sub-group's record in memory, in turn: read from disk through the pipeline, streamed from the
        host to the device, or where it is."""
        stored = self._stores.pipeline.through([o.record for o in subs if o.record.tier.stored])
        streaming = self.record_streamer.in_turn([o for o in subs if o.sub.streamed])
        with closing(stored) as read, closing(streaming) as streamed:
            for stepped in subs:
                if stepped.sub.streamed:
                    yield next(streamed)
                else:
                    yield next(read) if stepped.record.tier.stored else stepped.record.opened()
            for _ in itertools.chain(read, streamed):  # asking once more ends the last turn
                raise AssertionError("a record that no sub-group has")

    def _room(self, purpose: str, stepped: SteppedSubGroup) -> AbstractContextManager[None]:
        return room_for(self._accelerator, purpose, stepped.group.unit, 4 * stepped.sub.numel)

    def check_not_replaced(self) -> None:
        """Raise OptimizerError if the step of an optimizer was replaced since the engine took it over, which
        engine.step() would not call."""
        if wrapped := [each for each in members(self.optimizer) if is_wrapped(each)]:
            raise OptimizerError(
                f"the step of {name_of(*wrapped)} was replaced after zero.initialize, and engine.step() "
                "would not call the replacement: call optimizer.step(), or replace it before zero.initialize"
            )

    def check_groups(self) -> None:
        """Raise OptimizerError if param_groups have gained or lost parameters since the engine took them
        over, or have got options that their kernels lack."""
        if not self.installed.complete:
            raise OptimizerError(
                "the optimizer's param_groups have different parameters than at zero.initialize; give it all "
                "parameters before that, and change only hyper-parameters later"
            )
        for index in self._rules:
            self.check_options(index, self.optimizer.param_groups[index])

    def check_options(self, index: int, options: Mapping[str, Any]) -> None:
        """Raise OptimizerError if param_group `index` has a kernel that lacks one of these options."""
        if index in self._rules:
            self._rules[index].check(options)

    def move(self, stepped: SteppedSubGroup, tier: Tier) -> None:
        """Move a record between device memory and host memory; one on disk stays there."""
        self._move(stepped, tier.on(self._accelerator), streamed=False)

    def offload_state(self) -> None:
        """Move all records to the host; those on disk stay there."""
        if self.captured is not None:
            self.captured.drop()
        for stepped in self.subs:
            self.move(stepped, self._stores.host)

    def reload_state(self) -> None:
        """Move all records to where they belong."""
        for stepped in self.subs:
            self._move(stepped, stepped.sub.tier, stepped.sub.streamed)

    @lasting()
    def _move(self, stepped: SteppedSubGroup, tier: Tier, streamed: bool) -> None:
        sub = stepped.sub
        if sub.record.tier.stored:
            return
        self.record_streamer.return_to_host(sub)  # in place of one on the device
        old = sub.record
        with self._room("for the optimizer state of", stepped):
            new = tier.moved(self._stores, old, sub.shard, streamed)
            there = new.opened().master.device
            if new.tier == old.tier and new.opened().master is old.opened().master:
                return
            device = self._accelerator.device if streamed else there
            steps = None if stepped.rule is None else stepped.steps.to(device)
            state_beside = self.installed.state_beside_on(stepped, there)
        sub.record = new  # only now that there is room for all of it
        if steps is not None:
            stepped.steps = steps
        self.installed.show(stepped)
        self.installed.take_state_beside(state_beside)

    def moments_bytes(self, stepped: SteppedSubGroup) -> int:
        """Bytes of a sub-group's state besides the master, wherever it is."""
        moments = sum(m.numel() * m.element_size() for m in stepped.record.moments)
        return moments + sum(value.nbytes for value in self.installed.state_beside([stepped]))

    def bytes_beside_records(self) -> int:
        """Bytes of the device in use for state besides the groups' records: for streamed ones, and for what
        the user's optimizer itself keeps, or steps."""
        values, device = self.installed.state_beside(self.subs), self._accelerator.device
        near = sum(value.nbytes for value in values if value.device == device)
        return self.record_streamer.device_bytes() + near + self.self_stepping.value_bytes

    def _make_state(self, stepped: SteppedSubGroup, rule: Rule) -> None:
        record = stepped.record
        record.tier.add_moments(self._stores, record, rule.columns(record.master.dtype))
        streamed, accelerator = stepped.sub.streamed, self._accelerator
        device = accelerator.device if streamed else record.tier.memory(accelerator)
        stepped.steps = torch.zeros(len(stepped.pieces), dtype=torch.float32, device=device)
        self.installed.show_state(stepped, rule)

    def _step_sub_group(
        self,
        stepped: SteppedSubGroup,
        have: StepGradients,
        state: Opened,
        factors: Factors,
        rates: Tensor | None,
    ) -> None:
        sub, device = stepped.sub, state.master.device
        gradient = sub.of(have.slice.get()).to(device)
        shard = state.master if sub.shard_serves else sub.shard
        writer = WeightWriter(self._stores, shard, state)
        groups, kernels = self.optimizer.param_groups, self._stores.kernels(device)
        written = step_sub_group(
            stepped, have.used, groups, kernels, state, gradient, factors, writer.narrow, rates
        )
        writer.deliver(written, factors.skip)


def _between_hooks(optimizers: Sequence[Optimizer], step: Callable[[], None]) -> None:
    """Run `step` inside torch's own wrapper of each optimizer's step: with its hooks and profiler range."""
    if not optimizers:
        step()
        return
    first, *others = optimizers

    def inside(optimizer: Optimizer) -> None:
        _between_hooks(others, step)

    Optimizer.profile_hook_step(inside)(first)


def _callers_check(sharded: ShardedOptimizer) -> Callable[..., None]:
    """Make the user's optimizer refuse its own step, by a reference to it from before, outside the engine's.
    It must not hold what holds it."""
    found = weakref.ref(sharded)

    def check_caller(*_: Any) -> None:
        alive = found()
        if alive is None or not alive._in_step:
            raise UsageError(
                "a step of the optimizer that was taken before zero.initialize would change nothing: call "
                "optimizer.step() or engine.step()"
            )

    return check_caller
