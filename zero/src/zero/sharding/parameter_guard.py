"""What a program may do with a unit's parameters: nothing while they are released, only read in a forward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zero.sharding.alterations import versions_of
from zero.sharding.guard import sharded_class


class ParameterGuard:
    """The parameters of a unit, in the order of its groups, and those that wrap them."""

    def __init__(self, parameters: Sequence[nn.Parameter], wrappers: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        guarded = (*parameters, *wrappers)
        self._open = [(parameter, type(parameter)) for parameter in guarded]
        self._closed = [(parameter, sharded_class(type(parameter))) for parameter in guarded]
        self._versions: list[int] | None = None  # when a forward began to compute
        self._exposed = False  # see `expose`

    def close(self) -> None:
        """Have the parameters raise when their values are needed; see `ShardedParameter`."""
        if not self._exposed:
            for parameter, closed in self._closed:
                parameter.__class__ = closed

    def open(self) -> None:
        for parameter, opened in self._open:
            parameter.__class__ = opened

    def expose(self, released: bool = False) -> None:
        """Take the guard off the parameters, whether they are whole or not.

        For a tracer, which reads no values, or because values are about to arrive. released: parameters that
        are released before `conceal` stay unguarded, too.
        """
        self._exposed = released
        self.open()

    def conceal(self, whole: bool) -> None:
        """End `expose`. whole: the parameters have their values."""
        self._exposed = False
        if not whole:
            self.close()

    def begin_compute(self) -> None:
        """Note that a forward begins to compute: the parameters must not change until `end_compute`."""
        self._versions = versions_of(self._parameters)

    def set_to_itself(self, parameter: nn.Parameter) -> None:
        """Note that one write that torch counts in this forward, the last one, has written nothing."""
        if self._versions is not None:
            self._versions[next(i for i, p in enumerate(self._parameters) if p is parameter)] += 1

    def end_compute(self) -> list[int] | None:
        """Return the indices of parameters written to since `begin_compute`; None if that was not called."""
        before, self._versions = self._versions, None
        if before is None:
            return None
        now = versions_of(self._parameters)
        return [] if now == before else [i for i, version in enumerate(now) if version != before[i]]
