"""The calls of one unit: the one under way, and those whose backward may come, is under way, or is over."""

from __future__ import annotations

from weakref import WeakSet

from torch import nn

from zero.sharding.sharded_unit import ShardedUnit
from zero.training_pass.call import Call, CallEdges


class UnitCalls:
    """What is known of the calls of a unit.

    depth: hooked modules being called, nested. edges, in_order: of the call under way, if it has gradients;
    the second if all ranks make the call. in_graphs: calls whose outputs still exist. ahead: those whose
    backward may come, or is under way. over: those whose backward is over, in the backward under way.
    open_ended: there was a call whose backward ends only with the whole one.
    """

    def __init__(self, unit: ShardedUnit) -> None:
        self.unit = unit
        self.depth = 0
        self.edges: CallEdges | None = None
        self.in_order: Call | None = None
        self.in_graphs: WeakSet[CallEdges] = WeakSet()
        self.ahead: set[Call] = set()
        self.over: list[Call] = []
        self.open_ended = False
        mine = self.parameters = {p for group in unit.groups for p in group.parameters}
        within = dict.fromkeys(p for hooked in unit.hooked_modules for p in hooked.parameters())
        self._others: list[nn.Parameter] = [parameter for parameter in within if parameter not in mine]

    def reset(self) -> None:
        """Forget calls under way, after a backward or an exception."""
        self.leave_forward()
        for call in (*self.ahead, *self.over):
            if call.taken:
                call.forget_graph()
        self.forget_progress()
        self.open_ended = False

    def leave_forward(self) -> None:
        """End all forwards under way. Calls that wait for their backward stay."""
        self.depth = 0
        self.edges = self.in_order = None
        self.unit.forwards = 0

    def forget_progress(self) -> None:
        """Forget calls in backward: none is under way."""
        self.ahead.clear()
        self.over.clear()

    def in_running_graph(self) -> list[Call]:
        """The calls that autograd's running task goes through, and which are not ahead yet."""
        return [
            edges.call for edges in self.in_graphs if edges.call not in self.ahead and edges.is_in_graph()
        ]

    def gradient_arrived(self, task: int) -> None:
        """Note that a parameter has got a gradient in a task of autograd's that is not the outermost.

        Calls that an outer backward began do not end with the gradients of a backward that runs inside it
        (reentrant checkpointing): more may come from the outer one.
        """
        for call in self.unit.calls_in_backward:
            if call.task < task:
                call.ends_with_gradients = False

    def gradients_complete(self) -> None:
        """Note that every trainable parameter has its gradient.

        Ends the calls whose end no input reports, unless gradients may still pass through frozen parameters
        or go to those of other units.
        """
        calls = self.unit.calls_in_backward
        open_ended = {call for call in calls if call.ends_with_gradients and call.newest_input < 0}
        if not open_ended:  # its user releases it: a call at its end, or a graph
            return
        if not any(p.requires_grad for p in self._others) and all(p.requires_grad for p in self.parameters):
            calls -= open_ended
            self.unit.release()
