"""`optimizer.state` of an engine: what kernels step is shown there, and changes only in place.

Whatever would be lost without a word raises: to drop or replace what is shown, and to look for state by a
parameter of the model, of which the optimizer has pieces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from zero.errors import UsageError
from zero.sharding.guard import NAME_ATTRIBUTE


class ShownPiece(dict[str, Any]):
    """The state of a piece that a kernel steps.

    names: of what is shown, views of its record, which the engine changes by `update`. What else a program
    keeps here, as wrappers of optimizers do, is its own.
    """

    def __init__(self, names: Iterable[str], state: Mapping[str, Any]) -> None:
        super().__init__(state)
        self.names = frozenset(names)

    def __setitem__(self, key: str, value: Any) -> None:
        if value is not self.get(key):  # as tensors are that are moved to where they are
            self._check(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._check(key)
        super().__delitem__(key)

    def clear(self) -> None:
        self._check(*self)
        super().clear()

    def pop(self, key: str, *default: Any) -> Any:
        self._check(key)
        return super().pop(key, *default)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # of a copy, also one in a file

    def _check(self, *keys: str) -> None:
        if not self.names.isdisjoint(keys):
            raise UsageError(_IN_PLACE)


class ShownState(defaultdict[Any, dict[str, Any]]):
    """State by piece. What an optimizer keeps for pieces that it steps itself is its own.

    pieces: all that the optimizer has. The engine adds what is shown by `setdefault`.
    """

    def __init__(self, pieces: Iterable[Tensor]) -> None:
        super().__init__(dict)
        self._pieces = set(map(id, pieces))

    def __missing__(self, key: Any) -> dict[str, Any]:
        if isinstance(key, Tensor) and NAME_ATTRIBUTE in key.__dict__ and id(key) not in self._pieces:
            raise UsageError(_OF_THE_MODEL.format(key.__dict__[NAME_ATTRIBUTE]))
        return super().__missing__(key)

    def __setitem__(self, key: Any, value: dict[str, Any]) -> None:
        shown = self.get(key)
        if isinstance(shown, ShownPiece):
            if any(value.get(name) is not shown[name] for name in shown.names):
                raise UsageError(_IN_PLACE)
            value = ShownPiece(shown.names, value)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._check(key)
        super().__delitem__(key)

    def pop(self, key: Any, *default: Any) -> Any:
        self._check(key)
        return super().pop(key, *default)

    def clear(self) -> None:
        for key in self:
            self._check(key)
        super().clear()

    def copy(self) -> Any:
        return defaultdict(dict, self)

    __copy__ = copy

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.items())

    def _check(self, key: Any) -> None:
        shown = self.get(key)
        if isinstance(shown, ShownPiece) and shown.names:
            raise UsageError(_IN_PLACE)


_ANEW = (
    "To begin with new state, call engine.attach(optimizer) on every rank, with one made from "
    "model.parameters()"
)
_IN_PLACE = (
    "optimizer.state shows what the engine steps, and to drop or replace a part of it would change nothing: "
    f"write into its tensors, as in state['exp_avg'].zero_(). {_ANEW}"
)
REPLACED = (
    "optimizer.state was replaced after zero.initialize, and the engine neither steps nor saves what is "
    "there now. Where the optimizer steps itself, optimizer.state.clear() lets it begin anew; what a kernel "
    "steps is changed in place, as in state['exp_avg'].zero_(), or begins anew with engine.attach(optimizer)"
)
_OF_THE_MODEL = (
    "optimizer.state has nothing of parameter {!r} of the model: it is kept for pieces of parameters, which "
    "are in optimizer.param_groups. engine.full_optimizer_state(name) returns a parameter's whole state"
)
