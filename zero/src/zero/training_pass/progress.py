"""Track how far a backward is: which forward calls it is past, and which are still to come.

Autograd runs the nodes of a graph newest first. So once it runs a node that is older than a call of a module,
every node of that call has run, whatever the module does inside: frozen weights, side losses, unused outputs.
Hooks on tensors report where autograd is, the same on all ranks, whatever each has used within a call.

For example, the call of a first unit makes nodes 0 to 4, and that of a second unit, which takes the output of
node 4, makes nodes 5 to 9. A backward runs node 9 first: the second call begins. When the gradient of its
input is ready, node 4 is next, so nothing from 5 on is left to run: the second call is over and the first one
begins.

Glossary
--------
call        one forward of a unit: `unit_call.Call`; its place in backwards is a `turn.Turn`.
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

import weakref
from bisect import insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from threading import RLock
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary


class Passed(Protocol):
    """A call's turn.

    task: the task of its backward. start: the number of the first node that may be its own. newest_input: the
    number of the newest producer of its inputs; -1 if they have none. index: that of its unit.
    """

    task: int
    start: int
    newest_input: int
    index: int

    def end(self) -> None:
        """Called when its backward is over, or will not come."""


class Progress:
    """How far the backwards of one engine are.

    on_entry(task): called first in each task, to `expect` the calls that are to come in it. on_way(task,
    number): called when autograd is about to run a node.
    """

    def __init__(
        self, device_type: str, on_entry: Callable[[int], None], on_way: Callable[[int, int], None]
    ) -> None:
        self._device_type = device_type
        self._on_entry = on_entry
        self._on_way = on_way
        self._mixed = False  # some nodes are on other devices
        self._one_thread = False
        self._entered = -1  # the newest task so far
        self._ahead: list[Passed] = []  # by task and start
        self._lock = RLock()
        # The producer, and what to call. Not an attribute of the tensor, which users may want to save.
        self._watched: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    @contextmanager
    def in_one_thread(self) -> Iterator[None]:
        """Let autograd run its nodes in the calling thread, newest first, whatever device they are on."""
        self._one_thread = True
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            self._one_thread = False

    def expect(self, call: Passed) -> None:
        """Note that the call's backward will come in this task, or has begun."""
        call.task = torch._C._current_graph_task_id()
        with self._lock:
            insort(self._ahead, call, key=attrgetter("task", "start", "index"))

    def enter(self) -> int:
        """Note that autograd runs; return the task in which it does."""
        task = torch._C._current_graph_task_id()
        with self._lock:
            if task > self._entered:
                self._entered = task
                self._on_entry(task)
        return task

    def come_to(self, number: int) -> None:
        """Note that autograd runs a node of this number: end the calls that are newer."""
        task = self.enter()
        while (call := self._pop_past(task, number)) is not None:
            call.end()
        self._on_way(task, number)

    def _pop_past(self, task: int, number: int) -> Passed | None:
        """Take out the newest call that autograd is past; None if there is none.

        If nodes run newest first, autograd is past no call if it is not past the newest one.
        """
        with self._lock:
            for place in reversed(range(len(self._ahead))):
                call = self._ahead[place]
                if call.task > task or (call.task == task and self._is_past(call, number)):
                    return self._ahead.pop(place)
                if self._newest_first:
                    break
        return None

    def _is_past(self, call: Passed, number: int) -> bool:
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

    def watch(self, tensor: Tensor, then: Callable[[], None] | None = None, at: int = -1) -> None:
        """Watch for the tensor's gradient to be ready, before its producer's backward, and then call `then`.

        Of several `then`, the last one given is called first. at: the number that autograd has come to by
        then; -1 for the producer's. A tensor that has since been changed in place has another producer.
        """
        self.look_at(tensor)
        number = number_of(tensor)
        producer, calls = self._watched.get(tensor, (None, []))
        if producer is None or producer is not tensor.grad_fn:
            calls = [(number, None)]
            self._watched[tensor] = tensor.grad_fn, calls
            tensor.register_hook(unserializable_hook(partial(_come, weakref.ref(self), calls)))
        if then is not None:
            calls.insert(0, (number if at < 0 else at, then))


Stop = tuple[int, Callable[[], None] | None]
"""A number that autograd has come to, and what to call then."""


def _come(progress: weakref.ref[Progress], stops: list[Stop], gradient: Any) -> None:
    alive = progress()
    for number, call in tuple(stops):
        if alive is not None:
            alive.come_to(number)
        if call is not None:
            call()


def number_of(tensor: Tensor) -> int:
    """Return the number of a tensor's producer."""
    assert tensor.grad_fn is not None
    return tensor.grad_fn._sequence_nr()


def next_number() -> int:
    """Return the number of the next node that this thread makes."""
    return torch.autograd._get_sequence_nr()
