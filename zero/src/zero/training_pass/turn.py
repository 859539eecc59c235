"""A call's turn: its place in backwards, on ranks whose graph has the call and on those whose graph has not.

See `progress` for the terms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from zero.errors import UsageError
from zero.sharding.gather_format import GatherFormat
from zero.sharding.sharded_unit import ShardedUnit
from zero.training_pass.progress import next_number

if TYPE_CHECKING:
    from zero.training_pass.unit_call import Call


class TurnUser(Protocol):
    """What is told when a call's backward begins and ends."""

    def await_turn(self, turn: Turn) -> None: ...

    def begin_backward(self, turn: Turn) -> None: ...

    def end_backward(self, turn: Turn) -> None: ...

    def is_current(self, turn: Turn) -> bool: ...


class Turn:
    """The place of one forward of a unit in backwards. It outlives what autograd's graph holds of the call.

    call: while the graph exists. unit, index: the unit's name and number. fmt: what the forward computed in.
    changes: see `ShardedUnit`, as of the forward. taken: whether the backward under way goes through the call
    on this rank or, as far as is known, on any. ends_with_gradients: of the unit's parameters, if no input
    has a producer.
    """

    __slots__ = (
        "_hooks",
        "call",
        "changes",
        "ends_with_gradients",
        "fmt",
        "index",
        "newest_input",
        "start",
        "taken",
        "task",
        "unit",
    )

    def __init__(self, hooks: TurnUser, unit: ShardedUnit, fmt: GatherFormat) -> None:
        self.unit = unit.name
        self.index = unit.index
        self.fmt = fmt
        self.changes = unit.changes
        self.start = next_number()
        self.newest_input = -1
        self.task = -1
        self.taken = False
        self.ends_with_gradients = True
        self.call: ref[Call] | None = None
        self._hooks = ref(hooks)

    @property
    def current(self) -> bool:
        """Whether the weights are still those of the forward."""
        hooks = self._hooks()
        return hooks is not None and hooks.is_current(self)

    @property
    def has_graph(self) -> bool:
        """Whether a graph of this rank still has the call, so that a backward may come to it."""
        return self.call is not None and self.call() is not None

    def look(self, root: Any) -> None:
        """Await the call's backward: autograd has entered a graph that may have the call, at node `root`."""
        call = None if self.call is None else self.call()
        self.taken = call is not None and call.may_begin(root)
        hooks = self._hooks()
        if hooks is not None:
            hooks.await_turn(self)

    def begin(self) -> None:
        hooks = self._hooks()
        if hooks is None:
            raise UsageError(
                "the model and its engine no longer exist: keep them until engine.backward(loss)"
            )
        hooks.begin_backward(self)

    def end(self) -> None:
        hooks = self._hooks()
        if hooks is not None:
            hooks.end_backward(self)

    def forget_graph(self) -> None:
        """Note that the graph is gone: its producers would keep the inputs' graph alive."""
        call = None if self.call is None else self.call()
        if call is not None:
            call.inputs.clear()
