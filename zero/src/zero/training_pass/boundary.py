"""The boundary between passes, where weights change: optimizer steps, and loads of other values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero.communication.communicator import Communicator
from zero.errors import UsageError
from zero.gradients.loss_scale import LossScale
from zero.gradients.reducer import GradientReducer
from zero.gradients.skipped_steps import SkippedSteps
from zero.optimizer.joint import members
from zero.ranges import in_range
from zero.sharding.flat_group import FlatGroup
from zero.sharding.shard_source import fetch
from zero.sharding.sharded_unit import ShardedUnit, refill
from zero.tiers.stores import Stores
from zero.tiers.values import put
from zero.training_pass.training_pass import TrainingPass
from zero.warning import warn

if TYPE_CHECKING:
    from zero.compiled.model import CompiledModel
    from zero.memory.memory_tracer import MemoryTracer
    from zero.memory.placement_policy import StaticPlacementPolicy
    from zero.optimizer.integrity import Integrity
    from zero.optimizer.sharded_optimizer import ShardedOptimizer
    from zero.whole.full_parameters import FullParameters
    from zero.whole.held_gradients import HeldGradients


@dataclass(kw_only=True, eq=False, repr=False)
class Boundary:
    """Changes the weights between passes.

    check_state: raises StateError if the optimizers have made state that no checkpoint can hold; collective.
    steps: optimizer steps taken, skipped ones included.
    """

    communicator: Communicator
    stores: Stores
    integrity: Integrity
    training_pass: TrainingPass
    reducer: GradientReducer
    held_gradients: HeldGradients
    loss_scale: LossScale | None
    skipped_steps: SkippedSteps | None
    optimizer: ShardedOptimizer
    full_parameters: FullParameters
    placement: StaticPlacementPolicy
    compiled: CompiledModel | None
    tracer: MemoryTracer
    check_state: Callable[[], None]
    steps: int = 0
    _state_checked: bool = field(default=False, init=False)
    _stepped: set[Optimizer] = field(default_factory=set, init=False)  # in the last step

    # -- what the program's optimizers do; see `optimizer.taken_over` ------------------------------------

    def step_of(self, optimizer: Optimizer) -> None:
        """Step one of the program's optimizers; gradients stay until they are dropped. Collective."""
        if self.training_pass.counts:
            raise UsageError(_COUNTS.format("optimizer.step()", "engine.step()"))
        self.training_pass.notice_failure()
        if self.training_pass.has_gradients:
            self.step(optimizer, keep=True)
            return
        self.held_gradients.check_none_given()
        self.training_pass.factor.attend(self.reducer)
        with self.changing_weights(()):
            self.optimizer.step(optimizer, (), None, None)  # its hooks run, as without an engine

    def zero_grad_of(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """Drop the gradients of one of the program's optimizers, or make them zero."""
        self.training_pass.notice_failure()
        if not self.training_pass.has_gradients:
            return
        if self.training_pass.counts:
            raise UsageError(_COUNTS.format("optimizer.zero_grad()", "engine.zero_grad()"))
        if not set_to_none:
            for parameter in self.held_gradients.used_by(optimizer):
                self.held_gradients.zero(parameter)
            return
        if optimizer is self.optimizer.optimizer:  # also what no_sync has left, of which ranks know their own
            self.training_pass.zero_grad()
            return
        self.held_gradients.drop(set(self.held_gradients.used_by(optimizer)))
        if not any(have.used or have.locally_used for have in self.reducer.all):
            self.training_pass.zero_grad()

    # -- steps -----------------------------------------------------------------------------------------

    @in_range("step")
    def step(self, optimizer: Optimizer, keep: bool) -> None:
        """Step an optimizer, or all that it has joined, with the gradients that there are. Collective.

        keep: whether the gradients stay. Raises GradientOverflowError, once the step is complete.
        """
        self.training_pass.check_not_in_use("step")
        if not self.training_pass.summed:
            raise UsageError(_NOT_SUMMED)
        self.integrity.check_step()
        multipliers = self.held_gradients.settle()
        self.communicator.check_alike(self.reducer.settings)  # of other data ranks: no backward compares them
        self.placement.before_step()
        self.tracer.begin_update()
        self.communicator.observation.phase("step")
        scale, skip = self.training_pass.factor.complete(self.reducer, multipliers)
        mine = self.optimizer.of(optimizer, self.reducer.all)
        stepped = {have.group for have in mine if have.used}
        if not stepped:
            warn(_NOTHING_TO_STEP, RuntimeWarning, rank=self.communicator.group.rank)
        self._raise_disk_errors()
        anew = self._is_anew(optimizer)
        with self.changing_weights({have.unit for have in self.reducer.all if have.group in stepped}):
            try:
                with self.communicator.postponing_disk_errors():
                    self.optimizer.step(optimizer, mine, scale, skip)
            finally:
                self.stores.join()  # weights are on their way to shards, even if a later group failed
            self._raise_disk_errors()
            if skip is not None and self.loss_scale is not None and anew:
                self.loss_scale.update(skip)
            self.training_pass.stepped() if keep else self.training_pass.drop_gradients()
        self.steps += anew
        self._after_step(anew)
        if keep:
            self.held_gradients.show_pieces()

    def _is_anew(self, optimizer: Optimizer) -> bool:
        """Whether this is an optimizer step of its own: not the turn of another optimizer in the last one."""
        mine = set(members(optimizer))
        anew = bool(self.training_pass.backwards or mine & self._stepped)
        self._stepped = mine if anew else self._stepped | mine
        return anew

    def _after_step(self, anew: bool) -> None:
        self.stores.accelerator.flush()
        self.tracer.end()
        self.placement.after_step()
        self.communicator.observation.step_over(self.steps)
        self.tracer.tell(self.communicator.observation)
        if self.compiled is not None:
            self.compiled.after_step()
        if self.skipped_steps is not None and anew:
            self.skipped_steps.after_step()
        if not self._state_checked and self.optimizer.has_state_beside:
            self._state_checked = True
            self.check_state()

    def refresh_weights(self) -> None:
        """Update the weights from the optimizer's values. Collective."""
        with self.changing_weights(self.training_pass.units):
            try:
                self.optimizer.deliver_changed()
            finally:
                self.stores.join()

    def exchange(self, others: Mapping[FlatGroup, Tensor]) -> None:
        """Exchange this rank's weights, and masters, with `others` of the same sizes. Collective.

        Until they have been exchanged again, nothing may train or load; gradients stay. Raises UsageError
        while anything else has changed places with the weights.
        """
        self.training_pass.check_not_in_use("exchange of weights")
        back = self.integrity.exchanged is others
        if not back:
            self.integrity.check_own("ema.swap")
        self.integrity.check_complete()
        self.integrity.check_refreshed()
        self.optimizer.record_streamer.return_all_to_host()
        with self.changing_weights(self.training_pass.units), torch.no_grad():
            for group, other in others.items():
                before = fetch(group.widest, other.device, self.communicator).clone()
                for values in dict.fromkeys((group.shard, group.widest)):
                    put(values, slice(0, other.numel()), other)
                other.copy_(before)
        self.integrity.exchanged = None if back else others
        self._raise_disk_errors()

    @contextmanager
    def changing_weights(self, units: Iterable[ShardedUnit]) -> Iterator[None]:
        """Wrap a change of the shards of `units`.

        A change that is interrupted half-way cannot be repeated, because some values are then new and others
        old; from then on the engine refuses to go on.
        """
        self._begin_change(units)
        try:
            yield
            refill(self.training_pass.units, frozen=False)
            self.integrity.snapshot_versions()
        except BaseException:
            self.integrity.interrupt()
            self.tracer.drop()
            self.training_pass.drop_gradients()
            raise

    @contextmanager
    def loading(self, everything: bool) -> Iterator[None]:
        """Wrap a load, which calls `begin_load` before it changes anything.

        everything: it replaces all values, those of an interrupted step or load included.
        """
        before = self.integrity.interrupted
        yield
        self.integrity.snapshot_versions()
        self.integrity.interrupted = before and not everything

    def begin_load(self) -> None:
        """Drop gradients and whole values: all weights are about to change."""
        self.training_pass.zero_grad()
        self.integrity.interrupt()
        self._begin_change(self.training_pass.units)

    def _begin_change(self, units: Iterable[ShardedUnit]) -> None:
        self.training_pass.release_all()  # whole values that were kept are about to be old
        for unit in units:
            unit.changes += 1  # a backward whose forward ran before had other weights
        self.full_parameters.begin_write()

    def _raise_disk_errors(self) -> None:
        """Raise OffloadError on every rank if the disk of any rank has failed. Collective."""
        if self.training_pass.config.offload.path is not None:
            self.communicator.agree()


_COUNTS = (
    "{} was called, but zero.Config(gradient_accumulation_steps=...) has a number, so the engine counts "
    "micro-batches: call {} instead, or leave the number out to decide yourself when a step is due"
)
_NOT_SUMMED = (
    "the last backward before step() was inside engine.no_sync(), so its gradients are no sums "
    "over the ranks: run the last backward of a step outside of it"
)
_NOTHING_TO_STEP = (
    "no parameter of the optimizer has a gradient on any rank, so this step changes nothing: are all of them "
    "frozen now, or does the loss not depend on them?"
)
