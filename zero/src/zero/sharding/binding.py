"""The memory that a group's parameters are views of, and parameters that a program has moved away from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accelz import FlatBuffer, rebind
from zero.sharding.alterations import elsewhere, reshaped
from zero.sharding.exact import computes_in
from zero.sharding.forms import as_parameter, twins_of


class Binding:
    """names: of the parameters, which are told by their index there. buffer: what they are views of.

    Their twins (see `forms`) are views of it too.
    """

    def __init__(self, names: Sequence[str], buffer: FlatBuffer) -> None:
        self._names = names
        self.buffer = buffer
        self._twins = [(i, twin) for i, p in enumerate(buffer.parameters) for twin in twins_of(p)]
        self._bind_twins()

    def bind(self, buffer: FlatBuffer) -> None:
        """Make the parameters views of `buffer`."""
        buffer.bind()
        self.buffer = buffer
        self._bind_twins()

    def _bind_twins(self) -> None:
        for index, twin in self._twins:
            rebind(as_parameter(twin), self.buffer.views[index])

    def moved_away(self) -> list[int]:
        """Return the parameters that a program has given other memory."""
        return elsewhere(self.buffer.parameters, self.buffer.views)

    def bind_again(self) -> None:
        """Bind what has `moved_away` to the group's memory again."""
        for index in self.moved_away():
            rebind(self.buffer.parameters[index], self.buffer.views[index])

    def check_fits(self, index: int, shape_only: bool = False) -> None:
        """Raise ModelError if the values that a parameter was given have another shape, dtype or device.

        shape_only: only for another shape.
        """
        values, view = self._both(index)
        if values.shape != view.shape if shape_only else not self._fits(index):
            raise reshaped(self._names[index], view, values)

    def take_in(self, index: int) -> None:
        """Copy the values that a parameter was given in other memory to the group's memory, and rebind it."""
        view = self.buffer.views[index]
        view.copy_(self.buffer.parameters[index].data)
        rebind(self.buffer.parameters[index], view)

    def differs(self, index: int) -> bool:
        """Return whether a parameter's values differ from the group's, in anything but their shape."""
        values, view = self._both(index)
        if values.shape != view.shape:
            return False
        return not (self._fits(index) and torch.equal(_comparable(values), _comparable(view)))

    def _fits(self, index: int) -> bool:
        values, view = self._both(index)
        return (values.shape, values.dtype, values.device) == (view.shape, view.dtype, view.device)

    def _both(self, index: int) -> tuple[Tensor, Tensor]:
        return self.buffer.parameters[index].data, self.buffer.views[index]


def _comparable(values: Tensor) -> Tensor:
    """View what torch does not compare, storage formats, as bytes."""
    stored = values.is_floating_point() and not computes_in(values.dtype)
    return values.view(torch.uint8) if stored else values
