"""What `initialize` asks of a device that does not declare storage_resize."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zero
from accelz import Capabilities, CopyAndKeep, FlatBuffer, FlatBufferStrategy, StorageSwap
from zero.drafts.checks import check_flat_buffers

HOST = torch.device("cpu")


class Keeping(FlatBuffer):
    def release(self) -> None:
        return


class KeepingStrategy(StorageSwap):
    def flatten(self, *args: Any) -> FlatBuffer:
        made = super().flatten(*args)
        return Keeping(made.data, made.parameters, made.slots)


class RefusingStrategy(StorageSwap):
    def flatten(self, *args: Any) -> FlatBuffer:
        raise RuntimeError("no such hook; set FOO=1")


def _check(strategy: type[FlatBufferStrategy], storage_resize: bool = False) -> None:
    double: Any = SimpleNamespace(
        name="foo",
        capabilities=Capabilities(storage_resize=storage_resize),
        flat_buffers=strategy(HOST),
    )
    check_flat_buffers(double, rank=0)


def test_a_device_whose_buffers_cannot_drop_bytes_is_refused_with_its_own_advice() -> None:
    with pytest.raises(zero.ConfigError, match=r"'foo' does not declare storage_resize.*set FOO=1"):
        _check(RefusingStrategy)
    with pytest.raises(zero.ConfigError, match="its backend must bring flat buffers of its own"):
        _check(KeepingStrategy)


def test_buffers_that_work_are_taken_and_a_declared_capability_is_believed() -> None:
    _check(StorageSwap)
    _check(RefusingStrategy, storage_resize=True)


def test_buffers_that_keep_their_bytes_are_taken_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="keep their memory on each rank, at every stage"):
        _check(CopyAndKeep)
