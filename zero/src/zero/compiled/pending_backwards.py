"""Forwards of compiled graphs that await their backward: the weights they had, and which are still to run.

Autograd's graph holds these hooks where Python's garbage collector does not see it, so they hold only weak
references.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd.function import BackwardCFunction

from zero.sharding.alterations import changed_since
from zero.sharding.sharded_unit import ShardedUnit
from zero.sharding.tensors import iter_tensors
from zero.training_pass.training_pass import TrainingPass


class PendingBackwards:
    """The backwards of one engine's graphs. more: whether another one follows the one that is running."""

    def __init__(self, units: Sequence[ShardedUnit], training_pass: TrainingPass) -> None:
        self.more = False
        self._pass = training_pass
        self._units = units
        self._nodes: WeakSet[Any] = WeakSet()  # of autograd's, each a graph's backward

    def expect(self, result: Any) -> None:
        """Note the result of a graph's forward, whose backward is to come."""
        made_by = (tensor.grad_fn for tensor in iter_tensors(result))
        for node in {node for node in made_by if node is not None}:
            is_backward = isinstance(node, BackwardCFunction)  # else a view of what the graph has returned
            ref = weakref.ref(node) if is_backward else None
            node.register_prehook(partial(_enter, weakref.ref(self), ref, self._changes()))
            if is_backward:
                self._nodes.add(node)

    def enter(self, node: Any, changes: Sequence[int]) -> None:
        """Note that autograd has reached a node. changes: counts of changes when its forward ran."""
        self._pass.enter()
        if self._changes() != changes:
            raise changed_since()
        if node is not None:
            self._nodes.discard(node)
            self.more = any(map(torch._C._will_engine_execute_node, self._nodes))

    def _changes(self) -> list[int]:
        return [unit.changes for unit in self._units]


def _enter(
    pending_backwards: weakref.ref[PendingBackwards],
    node: weakref.ref[Any] | None,
    changes: Sequence[int],
    _: Any,
) -> None:
    if (alive := pending_backwards()) is not None:
        alive.enter(None if node is None else node(), changes)
