"""An operation that finds no room on the device is tried once more, when state has made some.

The operation is repeated, not the forward or backward around it: what came before it stands, units stay as
they are gathered, and no collective is issued twice. So one rank may do it while the others do not notice, in
the middle of a backward as well. An operation that got no memory has changed nothing but the generator of
random numbers, which is put back.

Operations pass through Python for it, at some microseconds each: only while there is state that could move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accelz.accelerator import Accelerator


class SecondTry:
    """Around forwards and backwards.

    make_room(): moves state off the device; returns the bytes moved, 0 where there is none.
    movable(): whether there may be some.
    """

    def __init__(
        self, accelerator: Accelerator, make_room: Callable[[], int], movable: Callable[[], bool]
    ) -> None:
        self._repeating = _Repeating(accelerator, make_room)
        self._movable = movable
        self._depth = 0  # forwards and backwards under way, one inside another
        self._on = False

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Have it around their forwards."""
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self._begin(), prepend=True)
            module.register_forward_hook(lambda *_: self._end(), always_call=True)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Around a block, on every thread that autograd runs for it."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _begin(self) -> None:
        self._depth += 1
        if self._depth == 1 and self._movable():
            self._repeating.__enter__()
            self._on = True

    def _end(self) -> None:
        self._depth = max(self._depth - 1, 0)  # a hook that raised in front of _begin has kept it from us
        if self._depth == 0 and self._on:
            self._on = False
            self._repeating.__exit__(None, None, None)


class _Repeating(TorchDispatchMode):
    def __init__(self, accelerator: Accelerator, make_room: Callable[[], int]) -> None:
        super().__init__()
        self._rng = accelerator.rng
        self._make_room = make_room

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
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
