"""Makes torch take a device name that it knows but cannot serve here, by another device that it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class StandIn(TorchFunctionMode):
    """Every torch function that is given the device `name` gets `other` instead, and tensors that are on
    `other` say that they are on `name` (not inside of a torch function, where no mode is in force).

    at_use: called before each such function. drop: keyword arguments that `other` does not take; those
    that were given are counted in `dropped`.
    """

    def __init__(self, name: str, other: str, at_use: Callable[[], None], drop: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._name, self._other, self._at_use, self._drop = name, torch.device(other), at_use, drop
        self.dropped = dict.fromkeys(drop, 0)

    def install(self) -> None:
        """Be in force for the rest of the process, also in hooks that a backward runs."""
        self.__enter__()
        run: Any = torch.autograd._engine_run_backward  # torch leaves the mode before it calls this

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            with self:
                return run(*args, **kwargs)

        torch.autograd._engine_run_backward = run_backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.device:  # naming a device is not using it
            return func(*args, **given)
        for name in self._drop:
            self.dropped[name] += bool(given.pop(name, False))
        result = func(*map(self._mapped, args), **{k: self._mapped(v) for k, v in given.items()})
        if func == torch.Tensor.device.__get__ and result.type == self._other.type != "cpu":
            return torch.device(self._name, result.index)
        return result

    def _mapped(self, value: Any) -> Any:
        named = isinstance(value, str) and value.partition(":")[0] == self._name
        if not named and not (isinstance(value, torch.device) and value.type == self._name):
            return value
        self._at_use()
        return self._other
