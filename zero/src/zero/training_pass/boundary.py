"""The boundary between passes, where weights change: optimizer steps, and loads of other values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from zero.communication.communicator import Communicator
from zero.config.training import Config
from zero.gradients.factor import GradientFactor
from zero.gradients.loss_scale import LossScale
from zero.gradients.reducer import GradientReducer
from zero.gradients.skipped_steps import SkippedSteps
from zero.ranges import in_range
from zero.sharding.sharded_unit import ShardedUnit, refill
from zero.tiers.stores import Stores
from zero.training_pass.training_pass import TrainingPass
from zero.warning import warn

if TYPE_CHECKING:
    from zero.compiled.model import CompiledModel
    from zero.integrity import Integrity
    from zero.memory.memory_tracer import MemoryTracer
    from zero.memory.placement_policy import StaticPlacementPolicy
    from zero.optimizer.sharded_optimizer import ShardedOptimizer
    from zero.whole.full_parameters import FullParameters
    from zero.whole.held_gradients import HeldGradients


@dataclass(kw_only=True, eq=False, repr=False)
class Boundary:
    """Changes the weights between passes."""

    config: Config
    communicator: Communicator
    units: Sequence[ShardedUnit]
    stores: Stores
    integrity: Integrity
    training_pass: TrainingPass
    reducer: GradientReducer
    factor: GradientFactor
    held_gradients: HeldGradients
    loss_scale: LossScale | None
    skipped_steps: SkippedSteps | None
    optimizer: ShardedOptimizer
    full_parameters: FullParameters
    placement: StaticPlacementPolicy
    compiled: CompiledModel | None
    tracer: MemoryTracer

    @in_range("step")
    def step(self) -> None:
        """Step the optimizer with the gradients that there are, and drop them. Collective."""
        self.training_pass.check_not_in_use("step")
        self.integrity.check_step()
        multipliers = self.held_gradients.settle()
        self.placement.before_step()
        self.tracer.begin_update()
        scale, skip = self.factor.complete(self.reducer, multipliers)
        if not any(True for _ in self.reducer.used()):
            warn(_NOTHING_TO_STEP, RuntimeWarning, rank=self.communicator.group.rank)
        self._raise_disk_errors()
        with self.changing_weights({have.unit for have in self.reducer.all if have.used}):
            self._update(scale, skip)
            self.training_pass.drop_gradients()

    def _update(self, scale: Tensor | None, skip: Tensor | None) -> None:
        try:
            with self.communicator.postponing_disk_errors():
                self.optimizer.step(self.reducer.all, scale, skip)
        finally:
            self.stores.join()  # weights are on their way to shards, even if a later group failed
        self._raise_disk_errors()
        if self.loss_scale is not None and skip is not None:
            self.loss_scale.update(skip)

    def after_step(self) -> None:
        """Do what follows an optimizer step that is complete. Collective. Raises GradientOverflowError."""
        self.stores.accelerator.flush()
        self.tracer.end()
        self.placement.after_step()
        if self.compiled is not None:
            self.compiled.after_step()
        if self.skipped_steps is not None:
            self.skipped_steps.after_step()

    def refresh_weights(self) -> None:
        """Update the weights from the optimizer's values. Collective."""
        with self.changing_weights(self.units):
            try:
                self.optimizer.deliver_changed()
            finally:
                self.stores.join()

    @contextmanager
    def changing_weights(self, units: Iterable[ShardedUnit]) -> Iterator[None]:
        """Wrap a change of the shards of `units`.

        A change that is interrupted half-way cannot be repeated, because some values are then new and others
        old; from then on the engine refuses to go on.
        """
        self._begin_change(units)
        try:
            yield
            refill(self.units, frozen=False)
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
        self._begin_change(self.units)

    def _begin_change(self, units: Iterable[ShardedUnit]) -> None:
        self.training_pass.release_all()  # whole values that were kept are about to be old
        for unit in units:
            unit.changes += 1  # a backward whose forward ran before had other weights
        self.full_parameters.begin_write()

    def _raise_disk_errors(self) -> None:
        """Raise OffloadError on every rank if the disk of any rank has failed. Collective."""
        if self.config.offload.path is not None:
            self.communicator.agree()


_NOTHING_TO_STEP = (
    "no parameter of the engine has a gradient on any rank, so this step changes nothing: are all of them "
    "frozen now, or does the loss not depend on them?"
)
