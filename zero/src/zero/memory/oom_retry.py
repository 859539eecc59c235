"""An operation that finds no room on the device is tried once more, when state has made some.

The operation is repeated, not the forward or backward around it: what came before it stands, units stay as
they are gathered, and no collective is issued twice. So one rank may do it while the others do not notice, in
the middle of a backward as well. An operation that got no memory has changed nothing but the generator of
random numbers, which is put back.

Operations pass through Python for it, which costs more than many of them take. So it is done only where a
forward has larger inputs than it ever had, or a forward or backward begins with more memory in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from accelz import Accelerator
from zero.sharding.lifetime import ModelRef
from zero.sharding.tensors import iter_tensors

SLACK = 0.005  # of the capacity: growth that the plan's margin has room for


class OomRetry:
    """Around forwards and backwards. However these end, by a KeyboardInterrupt as well, it is off then.

    make_room(): moves state off the device; returns the bytes moved, 0 where there is none.
    movable(): bytes on the device that may be moved.
    """

    def __init__(
        self, accelerator: Accelerator, make_room: Callable[[], int], movable: Callable[[], int]
    ) -> None:
        self._memory = accelerator.memory
        self._repeating = _Repeating(accelerator, make_room)
        self._movable = movable
        # Bytes of inputs, and in use beside movable; by module, and of backwards by this object.
        self._most: WeakKeyDictionary[object, tuple[int, int]] = WeakKeyDictionary()
        self._under_way: set[object] = set()  # forwards and backwards, one inside another

    def wrap(self, modules: Iterable[nn.Module]) -> None:
        """Wrap the calls of these modules. Hooks would not do: none runs after a KeyboardInterrupt."""
        for module in modules:
            module._compiled_call_impl = self._wrapped(module)  # what `module(...)` calls, if set

    def _wrapped(self, module: nn.Module) -> Callable[..., Any]:
        compiled, called = module._compiled_call_impl, ModelRef(module)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            this, outermost, module = object(), not self._under_way, called()
            try:
                self._begin(this, outermost, module, args, kwargs)
                return (compiled or module._call_impl)(*args, **kwargs)
            finally:
                self._end(this, outermost)

        return torch.compiler.disable(wrapped, recursive=False)  # type: ignore[no-any-return]

    @contextmanager
    def on(self) -> Iterator[None]:
        """Around a backward, on every thread that autograd runs for it."""
        self._under_way.clear()  # an interrupt may have left some: none is under way in a new backward
        this = object()
        try:
            self._begin(this, True, self)
            yield
        finally:
            self._end(this, True)

    def _begin(self, this: object, outermost: bool, what: object, *arguments: Any) -> None:
        self._under_way.add(this)
        if outermost:
            self._switch_off()
            if self._has_grown(what, sum(t.nbytes for t in iter_tensors(arguments))):
                self._repeating.__enter__()

    def _has_grown(self, what: object, inputs: int) -> bool:
        stats, movable = self._memory.stats(), self._movable()
        base = stats.allocated - movable
        known = self._most.get(what, (-1, -1))
        self._most[what] = max(known[0], inputs), max(known[1], base)
        return bool(movable) and (inputs > known[0] or base > known[1] + SLACK * stats.capacity)

    def _end(self, this: object, outermost: bool) -> None:
        try:
            if outermost:
                self._switch_off()
        finally:
            self._under_way.discard(this)

    def _switch_off(self) -> None:
        if _get_current_dispatch_mode() is self._repeating:
            self._repeating.__exit__(None, None, None)


class _Repeating(TorchDispatchMode):
    def __init__(self, accelerator: Accelerator, make_room: Callable[[], int]) -> None:
        super().__init__()
        self._rng = accelerator.rng
        self._make_room = make_room

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Parts that the user compiles stay compiled: their operations are not repeated."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        random = torch.Tag.nondeterministic_seeded in func.tags
        before = self._rng.get_state() if random else None
        try:
            return func(*args, **keywords)
        except torch.OutOfMemoryError:
            if not self._make_room():
                raise
        if before is not None:
            self._rng.set_state(before)
        return func(*args, **keywords)
