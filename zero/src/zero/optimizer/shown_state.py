"""`optimizer.state` of an engine: what kernels step is shown there, and changes only in place.

Whatever would be lost without a word raises: to drop or replace what is shown, and to look for state by a
parameter of the model, of which the optimizer has pieces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from zero.errors import UsageError
from zero.sharding.guard import NAME_ATTRIBUTE


class ShownPiece(dict[str, Any]):
    """The state of a piece that a kernel steps: views of its record. The engine changes it by `update`."""

    def __setitem__(self, key: str, value: Any) -> None:
        if value is not self.get(key):  # as tensors are that are moved to where they are
            raise UsageError(_IN_PLACE if key in self else _BESIDE.format(key))

    def __delitem__(self, key: str) -> None:
        self.pop(key)

    def clear(self) -> None:
        if self:
            raise UsageError(_IN_PLACE)

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            raise UsageError(_IN_PLACE)
        return super().pop(key, *default)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # of a copy, also one in a file


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
        if not isinstance(shown, ShownPiece):
            super().__setitem__(key, value)
        elif shown.keys() != value.keys() or any(value[name] is not shown[name] for name in shown):
            raise UsageError(_IN_PLACE)

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
        if shown and isinstance(shown, ShownPiece):
            raise UsageError(_IN_PLACE)


_ANEW = (
    "To begin with new state, call engine.attach(optimizer) on every rank, with one made from "
    "model.parameters()"
)
_IN_PLACE = (
    "optimizer.state shows what the engine steps, and to drop or replace a part of it would change nothing: "
    f"write into its tensors, as in state['exp_avg'].zero_(). {_ANEW}"
)
_BESIDE = (
    "optimizer.state has what a kernel steps, and the engine would neither move {0!r} with it nor load it "
    "from a checkpoint: keep it in a dictionary of your own, by the pieces in optimizer.param_groups"
)
REPLACED = (
    "optimizer.state was replaced after zero.initialize, and the engine neither steps nor saves what is "
    "there now. What a kernel steps is changed in place, as in state['exp_avg'].zero_(); of several "
    f"optimizers, those that step themselves lose state by `del optimizer.state[piece]`. {_ANEW}"
)
_OF_THE_MODEL = (
    "optimizer.state has nothing of parameter {!r} of the model: it is kept for pieces of parameters, which "
    "are in optimizer.param_groups. engine.full_optimizer_state(name) returns a parameter's whole state"
)
