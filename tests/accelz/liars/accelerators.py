"""Lies of the accelerator itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, ClassVar

import torch

from accelz import (
    Accelerator,
    BackendUnavailableError,
)

from .kept import A_LITTLE, keep


class NotARole:
    """Nothing that an interface knows."""


class FlushRaises(Accelerator):
    def flush(self) -> None:
        raise AttributeError("mark_step")


class CountIsAFloat(Accelerator):
    def device_count(self) -> int:
        return float(super().device_count())  # type: ignore[return-value]


class RangesSwallow(Accelerator):
    """Its ranges end a block with an error as if there had been none."""

    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        return suppress(KeyError)


class RangesAreAscii(Accelerator):
    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        name.encode("ascii")
        return nullcontext()


class OneStackOfRanges(Accelerator):
    """All threads push onto one stack."""

    stack: ClassVar[list[str]] = []

    @contextmanager
    def profiler_range(self, name: str) -> Iterator[None]:
        self.stack.append(name)
        yield
        if self.stack.pop() != name:
            raise RuntimeError(f"{name} is not the innermost range")


class FirstRankOnly(Accelerator):
    def bind(self, local_rank: int) -> None:
        if local_rank:
            raise BackendUnavailableError("the device is taken")
        super().bind(local_rank)


class BindingKeeps(Accelerator):
    def bind(self, local_rank: int) -> None:
        keep(torch.ones(A_LITTLE))
        super().bind(local_rank)


class ResizeRefused(Accelerator):
    """A device whose storages cannot be resized, as without the hook resizePrivateUse1Bytes."""

    def bind(self, local_rank: int) -> None:
        super().bind(local_rank)
        torch.UntypedStorage.resize_ = _refuse  # type: ignore[method-assign, assignment]


class OneDeviceForAll(Accelerator):
    def bind(self, local_rank: int) -> None:
        super().bind(0)


class NotMadeCurrent(Accelerator):
    def bind(self, local_rank: int) -> None:
        self.device = torch.device(self.device.type, local_rank % self.device_count())
        self.flat_buffers.device = self.device


class OwnFlush(Accelerator):
    def flush(self) -> None:
        super().flush()


def _refuse(*_: Any) -> None:
    raise RuntimeError("Please register PrivateUse1HooksInterface")
