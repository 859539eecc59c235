"""Forwards of graphs that await their backward, and with which weights they were.

Autograd's graph holds the hooks here, where Python's collector does not see, so they hold nothing themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from zero.sharding.alterations import changed_since
from zero.sharding.sharded_unit import ShardedUnit
from zero.sharding.tensors import iter_tensors


class Awaiting:
    """The backwards of one engine's graphs."""

    def __init__(self, units: Sequence[ShardedUnit]) -> None:
        self._units = units

    def expect(self, result: Any) -> None:
        """A graph's forward has returned this."""
        made_by = (tensor.grad_fn for tensor in iter_tensors(result))
        for node in {node for node in made_by if node is not None}:
            node.register_prehook(partial(_enter, weakref.ref(self), self._changes()))

    def enter(self, changes: Sequence[int]) -> None:
        """Autograd comes to a node. changes: of the weights, when its forward ran."""
        if self._changes() != changes:
            raise changed_since()

    def _changes(self) -> list[int]:
        return [unit.changes for unit in self._units]


def _enter(awaiting: weakref.ref[Awaiting], changes: Sequence[int], _: Any) -> None:
    if (alive := awaiting()) is not None:
        alive.enter(changes)
