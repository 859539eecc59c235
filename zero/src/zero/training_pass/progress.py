"""How far a backward is: which forward calls it is past, and which are still to come.

Autograd runs the nodes of a graph newest first. So once it runs a node that is older than a call of a module,
every node of that call has run, whatever the module does inside: frozen weights, side losses, unused outputs.
Hooks on tensors report where autograd is, the same on all ranks, whatever each has used within a call.

For example, the call of a first unit makes nodes 0 to 4, and that of a second unit, which takes the output of
node 4, makes nodes 5 to 9. A backward runs node 9 first: the second call begins. When the gradient of its
input is ready, node 4 is next, so nothing from 5 on is left to run: the second call is over and the first one
begins.

Glossary
--------
call        one forward of a unit: `call.Call`; its edges are what autograd's graph holds of it.
producer    the node of autograd's graph that a tensor was made by, its `grad_fn`.
number      autograd's sequence number of a node: newer nodes have larger ones. Each thread counts for itself,
            so nodes that a device's thread recomputes in a backward cannot be compared with the rest.
task        one run of autograd over a graph. A backward inside a backward (reentrant checkpointing) is a task
            of its own, with a larger number, and is over before the outer one goes on.
past        autograd is past a call when the call's whole backward has run.

By itself, autograd has a thread for each device, and nodes of one do not wait for newer ones of another. So
the engine's backward runs all nodes in the calling thread, newest first: otherwise, if a graph is partly on
the host (`mixed`), ranks could come to its nodes in different orders. Where a user runs autograd over a mixed
graph, as torch.autograd.grad does, a call counts as over when the gradient of its newest input is ready.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from threading import RLock

import torch
from torch import Tensor

from zero.training_pass.call import Call


class Progress:
    """How far the backwards of one engine are, in the calls that are expected of this rank alone."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._mixed = False  # some nodes are on other devices
        self._one_thread = False
        self._ahead: list[Call] = []  # by task and start
        self._lock = RLock()

    @contextmanager
    def in_one_thread(self) -> Iterator[None]:
        """Let autograd run its nodes in the calling thread, newest first, whatever device they are on."""
        self._one_thread = True
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            self._one_thread = False

    def expect(self, call: Call) -> None:
        """Note that the call's backward will come in this task, or has begun."""
        call.task = torch._C._current_graph_task_id()
        with self._lock:
            insort(self._ahead, call, key=attrgetter("task", "start", "index"))

    def pop_past(self, task: int, number: int) -> Call | None:
        """Take out the newest call that autograd is past, as it runs a node of this number; None if there is
        none.

        If nodes run newest first, autograd is past no call if it is not past the newest one.
        """
        if not self._ahead:
            return None
        with self._lock:
            for place in reversed(range(len(self._ahead))):
                call = self._ahead[place]
                if call.task > task or (call.task == task and self._is_past(call, number)):
                    return self._ahead.pop(place)
                if self._newest_first:
                    break
        return None

    def _is_past(self, call: Call, number: int) -> bool:
        return call.start > number if self._newest_first else call.newest_input == number

    @property
    def _newest_first(self) -> bool:
        return self._one_thread or not self._mixed

    def reset(self) -> None:
        """Expect no more calls: before and after a backward, or after an exception."""
        with self._lock:
            self._ahead.clear()

    def look_at(self, tensor: Tensor) -> None:
        """Note which device a tensor of the graph is on."""
        self._mixed |= tensor.device.type != self._device_type
