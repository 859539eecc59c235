"""The boundary between passes, where weights change: optimizer steps, and loads of other values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from zero.communication.communicator import Communicator
from zero.config.training import Config
from zero.gradients.factor import GradientFactor
from zero.gradients.loss_scale import LossScale
from zero.gradients.reducer import GradientReducer
from zero.gradients.skipped_steps import SkippedSteps
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


class Boundary:
    """Changes the weights between passes."""

    def __init__(
        self,
        *,
        config: Config,
        communicator: Communicator,
        units: Sequence[ShardedUnit],
        stores: Stores,
        integrity: Integrity,
        training_pass: TrainingPass,
        reducer: GradientReducer,
        factor: GradientFactor,
        held_gradients: HeldGradients,
        loss_scale: LossScale | None,
        skipped_steps: SkippedSteps | None,
        optimizer: ShardedOptimizer,
        full_parameters: FullParameters,
        placement: StaticPlacementPolicy,
        compiled: CompiledModel | None,
        tracer: MemoryTracer,
    ) -> None:
        self.optimizer = optimizer
        self.stores = stores
        self._on_disk = config.tiers.path is not None
        self._communicator = communicator
        self._units = units
        self._integrity = integrity
        self._pass = training_pass
        self._reducer = reducer
        self._factor = factor
        self._held_gradients = held_gradients
        self._loss_scale = loss_scale
        self._skipped_steps = skipped_steps
        self._full_parameters = full_parameters
        self._placement = placement
        self._compiled = compiled
        self._tracer = tracer

    def step(self) -> None:
        """Step the optimizer with the gradients that there are, and drop them. Collective."""
        self._pass.check_not_in_use("step")
        self._integrity.check_step()
        multipliers = self._held_gradients.settle()
        self._placement.before_step()
        self._tracer.begin_update()
        scale, skip = self._factor.complete(self._reducer, multipliers)
        if not any(True for _ in self._reducer.used()):
            warn(_NOTHING_TO_STEP, RuntimeWarning, rank=self._communicator.group.rank)
        self._raise_disk_errors()
        with self.changing_weights({have.unit for have in self._reducer.all if have.used}):
            self._update(scale, skip)
            self._pass.drop_gradients()

    def _update(self, scale: Tensor | None, skip: Tensor | None) -> None:
        try:
            with self._communicator.postponing_disk_errors():
                self.optimizer.step(self._reducer.all, scale, skip)
        finally:
            self.stores.join()  # weights are on their way to shards, even if a later group failed
        self._raise_disk_errors()
        if self._loss_scale is not None and skip is not None:
            self._loss_scale.update(skip)

    def after_step(self) -> None:
        """Do what follows an optimizer step that is complete. Collective. Raises GradientOverflowError."""
        self.stores.accelerator.flush()
        self._tracer.end()
        self._placement.after_step()
        if self._compiled is not None:
            self._compiled.after_step()
        if self._skipped_steps is not None:
            self._skipped_steps.after_step()

    def refresh_weights(self) -> None:
        """Update the weights from the optimizer's values. Collective."""
        with self.changing_weights(self._units):
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
            refill(self._units, frozen=False)
            self._integrity.snapshot_versions()
        except BaseException:
            self._integrity.interrupt()
            self._tracer.drop()
            self._pass.drop_gradients()
            raise

    @contextmanager
    def loading(self, everything: bool) -> Iterator[None]:
        """Wrap a load, which calls `begin_load` before it changes anything.

        everything: it replaces all values, those of an interrupted step or load included.
        """
        before = self._integrity.interrupted
        yield
        self._integrity.snapshot_versions()
        self._integrity.interrupted = before and not everything

    def begin_load(self) -> None:
        """Drop gradients and whole values: all weights are about to change."""
        self._pass.zero_grad()
        self._integrity.interrupt()
        self._begin_change(self._units)

    def _begin_change(self, units: Iterable[ShardedUnit]) -> None:
        self._pass.release_all()  # whole values that were kept are about to be old
        for unit in units:
            unit.changes += 1  # a backward whose forward ran before had other weights
        self._full_parameters.begin_write()

    def _raise_disk_errors(self) -> None:
        """Raise OffloadError on every rank if the disk of any rank has failed. Collective."""
        if self._on_disk:
            self._communicator.agree()


_NOTHING_TO_STEP = (
    "no parameter of the engine has a gradient on any rank, so this step changes nothing: are all of them "
    "frozen now, or does the loss not depend on them?"
)
