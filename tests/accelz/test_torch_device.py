"""An accelerator derived from a device module. The kit and the engine's tests run on one: accelz-sim's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelz import BackendError, BackendUnavailableError, Collectives, CopyAndShrink, StorageSwap
from accelz.torch_device import TORCH_DEVICE, TorchAccelerator, TorchMemory, TorchRng, TorchStreams


class Module(SimpleNamespace):
    """A device module without a device: what it is asked to do is written down."""

    def __init__(self, devices: int) -> None:
        names = {*TorchMemory.NEEDS, *TorchStreams.NEEDS, *TorchRng.NEEDS}
        super().__init__(**dict.fromkeys(names), __name__="torch.mtia")
        self.taken: list[int] = []
        self.device_count = lambda: devices
        self.set_device = self.taken.append
        self.waited: list[list[int]] = []
        self.synchronize = lambda: self.waited.append(list(self.taken))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    module = Module(devices=4)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    return module


def build(**changes: Any) -> TorchAccelerator:
    return TorchAccelerator("mtia", Collectives("cpu:gloo,mtia:hccl"), **changes)


def test_nothing_touches_a_device_before_bind(module: Module) -> None:
    accelerator = build()
    assert module.taken == []
    assert module.waited == []
    accelerator.bind(2)
    assert module.taken == [2]
    assert module.waited == [[2]], "the first use of a device takes its time in bind"
    assert accelerator.device == accelerator.flat_buffers.device == torch.device("mtia", 2)


def test_a_rank_without_a_device_is_told(module: Module) -> None:
    with pytest.raises(BackendUnavailableError, match=r"local rank 4 .* sees 4.*--nproc-per-node"):
        build().bind(4)
    shared = build(capabilities=replace(TORCH_DEVICE, shared_device=True))
    shared.bind(5)
    assert shared.device.index == 1


def test_a_process_that_sees_no_device_is_told(module: Module) -> None:
    module.device_count = lambda: 0
    with pytest.raises(BackendUnavailableError, match=r"no mtia device: this process sees 0"):
        build(capabilities=replace(TORCH_DEVICE, shared_device=True)).bind(0)
    assert module.taken == []


def test_a_process_that_sees_one_device_takes_it(module: Module) -> None:
    module.device_count = lambda: 1
    accelerator = build()
    accelerator.bind(3)
    assert accelerator.device.index == 0


def test_the_strategy_follows_from_host_data_assignment(module: Module) -> None:
    assert isinstance(build().flat_buffers, StorageSwap)
    refuses = replace(TORCH_DEVICE, host_data_assignment=False)
    assert isinstance(build(capabilities=refuses).flat_buffers, CopyAndShrink)


@pytest.mark.parametrize(
    ("name", "role"),
    [("mem_get_info", "memory"), ("Stream", "streams"), ("set_rng_state", "rng"), ("set_device", "bind")],
)
def test_what_the_module_lacks_is_named(module: Module, name: str, role: str) -> None:
    delattr(module, name)
    with pytest.raises(BackendError, match=rf"torch\.mtia has no {name}: {role}.* cannot be derived"):
        build()


def test_a_role_of_ones_own_needs_nothing_of_the_module(module: Module) -> None:
    derived = build()
    del module.mem_get_info
    assert build(memory=derived.memory).memory is derived.memory


def test_free_memory_counts_what_the_allocator_keeps(module: Module) -> None:
    module.memory_allocated = lambda: 30
    module.max_memory_allocated = lambda: 50
    module.memory_reserved = lambda: 40
    module.mem_get_info = lambda: (60, 100)
    stats = build().memory.stats()
    assert (stats.allocated, stats.peak, stats.capacity, stats.free) == (30, 50, 100, 70)
