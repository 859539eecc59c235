"""Whether an engine may go on: its values are all there, of one step, and those that the program sees.

Whatever could make them otherwise without anyone noticing is refused here: a step or a load that did not
complete, state that is parked off the device, weights behind the optimizer's values, an average in their
place, parameters that the engine does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from zero.errors import UsageError, some
from zero.optimizer.joint import members
from zero.sharding.flat_group import FlatGroup
from zero.sharding.parameter_checks import ParameterChecks
from zero.sharding.sharded_unit import ShardedUnit

if TYPE_CHECKING:
    from zero.optimizer.sharded_optimizer import ShardedOptimizer
    from zero.optimizer.state_offload import StateOffload


@dataclass(eq=False, repr=False)
class Integrity:
    """Checks before whatever uses or changes values; `check_...` raises if they are not fit for that.

    interrupted: an optimizer step or a load did not complete, so that some values are new and others old.
    exchanged: what has changed places with the weights, if anything; see `Boundary.exchange`.
    """

    module: InitVar[nn.Module]
    units: InitVar[Sequence[ShardedUnit]]
    optimizer: ShardedOptimizer
    state_offload: StateOffload

    def __post_init__(self, module: nn.Module, units: Sequence[ShardedUnit]) -> None:
        self.interrupted = False
        self.exchanged: Mapping[FlatGroup, Tensor] | None = None
        self._parameter_checks = ParameterChecks(module, units)

    def interrupt(self) -> None:
        """Record that some values are new and others old: the engine refuses to go on until a load."""
        self.interrupted = True
        self.exchanged = None

    def snapshot_versions(self) -> None:
        """Record that weights and masters have the same values now; changes from here on are reported."""
        self._parameter_checks.snapshot_versions()
        self.optimizer.installed.snapshot()

    def check_complete(self) -> None:
        """Raise UsageError after a step or a load that did not complete."""
        if self.interrupted:
            raise UsageError(
                "an optimizer step or a load was interrupted and some values are new, others old: restore a "
                "checkpoint with engine.load_checkpoint, or build the model and the engine again"
            )

    def check_own(self, call: str) -> None:
        """Raise UsageError while something else lies in the weights' place."""
        if self.exchanged is not None:
            raise UsageError(
                f"{call}() was called inside ema.applied(), or after ema.swap(): weights and average have "
                "changed places. End the block first, or call ema.swap() again"
            )

    def check_present(self) -> None:
        """Raise UsageError while the state is off the device."""
        if self.state_offload.away:
            raise UsageError("the model's state is on the host: call engine.reload_states() first")

    def check_state(self) -> None:
        """Raise UsageError if `optimizer.state` is no longer what the engine steps, saves and loads."""
        self.optimizer.installed.check_state()

    def check_refreshed(self) -> None:
        """Raise UsageError if the optimizer's values were changed in place and the weights lack the change.

        After an interrupted step or load this is not checked: that has its own error for old values.
        """
        if not self.interrupted and (changed := self.optimizer.installed.changed()):
            names = dict.fromkeys(name for written in changed.values() for name in written)
            raise UsageError(_LEFT_BEHIND.format(some(list(names))))

    def check_showable(self) -> None:
        """Check, before a `gathered` block, that the values are present and match the optimizer's."""
        self.check_present()
        self.check_refreshed()

    def check_model(self) -> None:
        """Check, before whole values are saved or loaded, that the model's parameters are the engine's."""
        self._parameter_checks.check_model()

    def check_backward(self, loss: Tensor) -> None:
        """Check that a backward can run from `loss` and would reach the parameters that are trained."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"backward() needs a tensor of one element, the loss; got {what}")
        if not loss.requires_grad:
            raise UsageError(
                "backward(): the loss does not depend on any parameter that requires a gradient: was it "
                "computed under torch.no_grad(), from detached values, or are all parameters frozen?"
            )
        self.check_trainable()

    def check_trainable(self) -> None:
        """Check that a backward may begin and would reach the parameters that are trained."""
        if not members(self.optimizer.optimizer):
            raise UsageError(_READ_ONLY)
        self.check_own("backward")
        self.check_present()
        self.check_complete()
        self._parameter_checks.check_trained()

    def check_step(self) -> None:
        """Check that the optimizer would step what it was given.

        Warns of weights that were changed in place, which the step undoes.
        """
        self.check_own("step")
        self.check_state()
        self.optimizer.check_groups()
        self._parameter_checks.warn_of_changes()


_READ_ONLY = (
    "this model's engine has no optimizer, so the model is only read: call engine.attach(optimizer) before "
    "training it; or freeze it, with model.requires_grad_(False), for gradients to go through it only"
)
_LEFT_BEHIND = (
    "values in optimizer.param_groups were changed in place outside a step, and the weights do not have them "
    "yet: {}. Call engine.refresh_weights() on every rank after such a change"
)
