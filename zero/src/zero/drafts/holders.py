"""Who in the process holds an object that no model reaches, as Python's garbage collector sees it."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

from torch import Tensor, nn


class Holders:
    """The holders of some tensors. Walks all objects of the process, twice.

    but: a list of the caller's, which does not count.
    """

    def __init__(self, tensors: Sequence[Tensor], but: list[Tensor]) -> None:
        self._of: dict[int, list[Any]] = {id(tensor): [] for tensor in tensors}
        ignored = {id(tensors), id(but)}
        for holder in gc.get_referrers(*tensors):
            if id(holder) not in ignored and type(holder) is not FrameType:
                for part in gc.get_referents(holder):
                    if id(part) in self._of:
                        self._of[id(part)].append(holder)
        everything = gc.get_objects()
        modules = [item for item in everything if issubclass(type(item), nn.Module)]
        self._modules = {id(part): m for m in modules for part in vars(m).values() if type(part) is dict}
        self._modules |= {id(vars(m)): m for m in modules}
        self._functions = [item for item in everything if type(item) is FunctionType]

    def of(self, tensor: Tensor) -> list[Any]:
        """Return the tensor's holders; a local variable and what is not Python's own are not among them."""
        return self._of[id(tensor)]

    def only_by_name(self, tensor: Tensor) -> bool:
        """Return whether only state dicts hold a tensor, or variables that no function reads."""
        return all(
            type(holder) in _DICTS and (self._is_state_dict(holder) or self._is_unread(holder, tensor))
            for holder in self.of(tensor)
        )

    def _is_state_dict(self, holder: dict[Any, Any]) -> bool:
        tensors = all(type(key) is str and issubclass(type(v), Tensor) for key, v in holder.items())
        return tensors and id(holder) not in self._modules

    def _is_unread(self, holder: dict[Any, Any], tensor: Tensor) -> bool:
        """Return whether the tensor is a global variable that only the program's top level can use."""
        if not _is_globals(holder):
            return False
        names = set(_keys_of(holder, tensor))
        readers = (f.__code__ for f in self._functions if f.__globals__ is holder)
        return not any(names & _names_in(code) for code in readers)

    def described(self, tensor: Tensor) -> str:
        """Return words for a holder of the tensor."""
        for holder in self.of(tensor):
            if id(holder) in self._modules:
                return f"a {type(self._modules[id(holder)]).__name__} outside the model"
            if type(holder) in _DICTS and (keys := [str(key) for key in _keys_of(holder, tensor)]):
                where = f"the program {holder['__name__']!r}" if _is_globals(holder) else "a dict"
                return f"{keys[0]!r} in {where}"
            if type(holder) is not CellType:
                return f"a {type(holder).__name__}"
        return "a closure" if self.of(tensor) else "a local variable, or what is not Python's own"


_DICTS = (dict, OrderedDict)


def _is_globals(holder: dict[Any, Any]) -> bool:
    return "__name__" in holder and "__builtins__" in holder


def _keys_of(holder: dict[Any, Any], tensor: Tensor) -> Iterator[Any]:
    return (key for key, value in holder.items() if value is tensor)


def _names_in(code: CodeType) -> set[str]:
    """Return the global names that a function uses, or one inside it."""
    inside: Iterable[CodeType] = (part for part in code.co_consts if type(part) is CodeType)
    return set(code.co_names).union(*map(_names_in, inside))
