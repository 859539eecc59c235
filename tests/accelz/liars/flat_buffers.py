"""Lies of the flat buffers role."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelz import (
    FlatBuffer,
    Slot,
    StorageSwap,
)

from .kept import keep


class KeepsBytes(FlatBuffer):
    @property
    def materialized(self) -> bool:
        return not getattr(self, "_gone", False)

    def release(self) -> None:
        self._gone = True

    def materialize(self) -> None:
        self._gone = False


class ReleaseKeepsBytes(StorageSwap):
    def flatten(self, *args: Any, **kwargs: Any) -> FlatBuffer:
        made = super().flatten(*args, **kwargs)
        return KeepsBytes(made.data, made.parameters, made.slots)


class NeverComesBack(FlatBuffer):
    def materialize(self) -> None:
        return


class MaterializeForgets(StorageSwap):
    def flatten(self, *args: Any, **kwargs: Any) -> FlatBuffer:
        made = super().flatten(*args, **kwargs)
        return NeverComesBack(made.data, made.parameters, made.slots)


class StridesLost(StorageSwap):
    def flatten(self, parameters: Any, slots: Any, numel: int, dtype: torch.dtype) -> FlatBuffer:
        rows = [Slot(s.offset, s.shape, torch.empty(s.shape).stride(), s.numel) for s in slots]
        return super().flatten(parameters, rows, numel, dtype)


class GapsDirty(StorageSwap):
    def flatten(self, *args: Any, **kwargs: Any) -> FlatBuffer:
        made = super().flatten(*args, **kwargs)
        made.data[:1] = 3.0
        return made


class CopiesInsteadOfViews(StorageSwap):
    def flatten(self, parameters: Any, *args: Any, **kwargs: Any) -> FlatBuffer:
        made = super().flatten(parameters, *args, **kwargs)
        for parameter in parameters:
            parameter.data = parameter.data.clone()
        return made


class BindsWhenNotAsked(StorageSwap):
    def empty_like(self, buffer: FlatBuffer, dtype: torch.dtype) -> FlatBuffer:
        other = super().empty_like(buffer, dtype)
        other.bind()
        return other


class CommonAlone(StorageSwap):
    def share(self, buffer: FlatBuffer, group: Any) -> FlatBuffer | None:
        mine = FlatBuffer(buffer.data.clone(), buffer.parameters, buffer.slots, common=True)
        mine.bind()
        buffer.release()
        return mine


class RaisingBuffer(FlatBuffer):
    def materialize(self) -> None:
        raise MemoryError("fragmented")


class MaterializeRaises(StorageSwap):
    def flatten(self, *args: Any, **kwargs: Any) -> FlatBuffer:
        made = super().flatten(*args, **kwargs)
        return RaisingBuffer(made.data, made.parameters, made.slots)


class FlattenGivesATuple(StorageSwap):
    def flatten(self, *args: Any, **kwargs: Any) -> FlatBuffer:
        made = super().flatten(*args, **kwargs)
        return made.data, made.views  # type: ignore[return-value]


class Hoarder(FlatBuffer):
    def release(self) -> None:
        if self.materialized:
            keep(self.data.clone())
        super().release()


class ReleasedBytesKept(StorageSwap):
    def flatten(self, *args: Any, **kwargs: Any) -> FlatBuffer:
        made = super().flatten(*args, **kwargs)
        return Hoarder(made.data, made.parameters, made.slots)


class FurtherBuffersKept(StorageSwap):
    def empty_like(self, buffer: FlatBuffer, dtype: torch.dtype) -> FlatBuffer:
        return keep(super().empty_like(buffer, dtype))


class ModelsKept(StorageSwap):
    def flatten(self, *args: Any, **kwargs: Any) -> FlatBuffer:
        return keep(super().flatten(*args, **kwargs))


class Stasher(FlatBuffer):
    """A released buffer without a byte, whose bytes are next to it."""

    _stash: Tensor | None = None

    def release(self) -> None:
        self._stash = self.data.clone() if self.materialized else self._stash
        super().release()

    def materialize(self) -> None:
        super().materialize()
        self._stash = None


class ReleasedBytesStashed(StorageSwap):
    def flatten(self, *args: Any, **kwargs: Any) -> FlatBuffer:
        made = super().flatten(*args, **kwargs)
        return Stasher(made.data, made.parameters, made.slots)
