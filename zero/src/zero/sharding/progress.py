"""How far a backward is: which forward calls it is past, and which are to come.

Autograd runs the nodes of a graph newest first. So when one runs that is older than a call of a module, every
node of that call has run, whatever the module does inside: frozen weights, side losses, outputs that nobody
used. Hooks on tensors say where autograd is; the same on all ranks, whatever each has used within a call.

A backward inside a backward (reentrant checkpointing) is a graph task of its own, over before the outer one
goes on. Each thread numbers its nodes: what a device's thread recomputes is not to be compared with others.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary

Place = tuple[int, int, int]
"""A graph task, the number of the first node that may be the call's, and what else keeps calls in order."""


class Passed(Protocol):
    """A call. place: where it began, when its backward is ahead."""

    place: Place

    def pass_by(self) -> None:
        """Its backward is over, or will not come."""


class Progress:
    """Of the backwards of one engine. on_entry: called in each graph task, before anything else of it: tells
    the calls that are to come in it (`expect`)."""

    def __init__(self, on_entry: Callable[[], None]) -> None:
        self._on_entry = on_entry
        self._entered = -1  # the newest task so far
        self._ahead: list[Passed] = []  # by place
        # Producer, and what to call. Not an attribute of the tensor, which users may want to save.
        self._watched: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def expect(self, call: Passed, start: int, index: int) -> None:
        """The call's backward comes in this task, or has begun. start: the number of the first node that may
        be its own. index: of its unit."""
        call.place = (torch._C._current_graph_task_id(), start, index)
        insort(self._ahead, call, key=attrgetter("place"))

    def enter(self) -> int:
        """Autograd runs; the graph task in which it does."""
        task = torch._C._current_graph_task_id()
        if task > self._entered:
            self._entered = task
            self._on_entry()
        return task

    def come_to(self, age: int) -> None:
        """Autograd runs a node of this number: it is past calls that are newer."""
        here = (self.enter(), age + 1)
        while self._ahead and self._ahead[-1].place >= here:
            self._ahead.pop().pass_by()

    def reset(self) -> None:
        """Nothing is ahead: after a backward, or an exception."""
        self._ahead.clear()

    def watch(self, tensor: Tensor, then: Callable[[], None] | None = None) -> None:
        """Know when the tensor's gradient is ready, before its producer's backward; and call `then`, the last
        one given first. A tensor that was changed in place since has another producer."""
        producer, calls = self._watched.get(tensor, (None, []))
        if producer is None or producer is not tensor.grad_fn:
            calls = []
            self._watched[tensor] = tensor.grad_fn, calls
            hook = partial(_come, weakref.ref(self), age_of(tensor), calls)
            tensor.register_hook(unserializable_hook(hook))
        if then is not None:
            calls.insert(0, then)


def _come(progress: weakref.ref[Progress], age: int, calls: list[Callable[[], None]], gradient: Any) -> None:
    alive = progress()
    if alive is not None:
        alive.come_to(age)
    for call in tuple(calls):
        call()


def age_of(tensor: Tensor) -> int:
    """The number of a tensor's producer: newer ones have larger."""
    assert tensor.grad_fn is not None
    return tensor.grad_fn._sequence_nr()


def next_age() -> int:
    """What the next node that this thread makes will have."""
    return torch.autograd._get_sequence_nr()
