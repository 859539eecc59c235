"""An accelerator derived from a device module. The kit and the engine's tests run on one: accelz-sim's."""

from __future__ import annotations

import re
import weakref
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from accelz import (
    BackendError,
    BackendUnavailableError,
    Collectives,
    CopyAndKeep,
    CopyAndShrink,
    NullStreams,
    StorageSwap,
)
from accelz.torch_device import (
    TORCH_DEVICE,
    TorchAccelerator,
    TorchMemory,
    TorchRng,
    TorchStream,
    TorchStreams,
    name_device,
    scaling_of,
)


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


def test_the_strategy_follows_from_what_storages_can(module: Module) -> None:
    assert isinstance(build().flat_buffers, StorageSwap)
    refuses = replace(TORCH_DEVICE, host_data_assignment=False)
    assert type(build(capabilities=refuses).flat_buffers) is CopyAndShrink
    keeps = replace(TORCH_DEVICE, storage_resize=False)
    assert isinstance(build(capabilities=keeps).flat_buffers, CopyAndKeep)


@pytest.mark.parametrize(
    ("name", "role"),
    [("mem_get_info", "memory"), ("Stream", "streams"), ("set_rng_state", "rng"), ("set_device", "bind")],
)
def test_what_the_module_lacks_is_named(module: Module, name: str, role: str) -> None:
    delattr(module, name)
    with pytest.raises(BackendError, match=rf"torch\.mtia has no {name}: {role}.* cannot be derived"):
        build()


def test_all_that_is_missing_is_said_at_once(module: Module) -> None:
    del module.mem_get_info, module.Stream, module.Event, module.manual_seed
    expected = (
        "torch.mtia has no mem_get_info: memory cannot be derived from it; no Stream, Event: streams cannot "
        "be derived from it; no manual_seed: rng cannot be derived from it. Add what is missing to the module"
    )
    with pytest.raises(BackendError, match=re.escape(expected)):
        build()


def test_a_synchronous_device_needs_no_streams(module: Module) -> None:
    del module.Stream, module.Event, module.synchronize
    synchronous = replace(TORCH_DEVICE, asynchronous=False, streams=False)
    assert isinstance(build(capabilities=synchronous).streams, NullStreams)


def test_a_device_that_cannot_tell_its_capacity_is_given_one(module: Module) -> None:
    del module.mem_get_info
    module.memory_allocated = lambda: 30
    module.max_memory_allocated = lambda: 50
    module.memory_reserved = lambda: 40
    stats = build(capacity=100).memory.stats()
    assert (stats.allocated, stats.peak, stats.capacity, stats.free) == (30, 50, 100, 70)


class Accelerated(SimpleNamespace):
    """torch.accelerator, on a device whose allocator implements nothing for it."""

    def __init__(self) -> None:
        named = dict.fromkeys(("set_device_index", "empty_cache", "reset_peak_memory_stats"), self.nothing)
        numbers = dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), lambda: 0)
        super().__init__(**named, **numbers, get_memory_info=self.lacking, synchronize=self.nothing)
        self.current_accelerator = lambda: torch.device("mtia")

    def nothing(self, *_: Any) -> None:
        """What is done without saying so."""

    def lacking(self) -> tuple[int, int]:
        raise NotImplementedError(
            "getMemoryInfo is not implemented for this allocator yet.\nException raised"
        )


@pytest.fixture
def accelerated(module: Module, monkeypatch: pytest.MonkeyPatch) -> Accelerated:
    """A device whose memory is reached by torch.accelerator alone."""
    for name in (*TorchMemory.NEEDS, "set_device"):
        delattr(module, name)
    monkeypatch.setattr(torch, "accelerator", Accelerated())
    return torch.accelerator


def test_what_the_module_lacks_is_torch_accelerators(accelerated: Accelerated) -> None:
    accelerator = build()
    with pytest.raises(
        BackendError, match=r"not serve all roles on mtia:1\. memory: getMemoryInfo is not .*yet\. Impl"
    ):
        accelerator.bind(1)
    accelerated.get_memory_info = lambda: (60, 100)
    accelerator.bind(1)
    assert accelerator.memory.stats().capacity == 100
    accelerated.get_memory_info = accelerated.lacking
    given = build(capacity=200)
    given.bind(1)
    assert given.memory.stats().free == 200


def test_torch_accelerator_serves_no_other_device(accelerated: Accelerated) -> None:
    accelerated.current_accelerator = lambda: torch.device("cuda")
    with pytest.raises(BackendError, match="mtia has no set_device: bind"):
        build()


def test_a_device_that_torch_does_not_know_is_told() -> None:
    with pytest.raises(BackendError, match=r"'acme': import the library .*name_device\('acme', module\)"):
        TorchAccelerator("acme", Collectives())


def test_a_second_vendors_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "other")
    with pytest.raises(
        BackendError, match=r"'acme' cannot be a device of this process: .* 'other' has taken"
    ):
        name_device("acme", ModuleType("acme"))


class Tensors(SimpleNamespace):
    """A tensor, on a device that has no record_stream."""

    device = torch.device("mtia")

    def detach(self) -> Tensors:
        return self


def test_what_a_stream_uses_is_held_where_the_allocator_cannot(module: Module) -> None:
    passed: list[bool] = []
    module.Event = lambda enable_timing: SimpleNamespace(record=lambda _: None, query=lambda: bool(passed))
    streams = TorchStreams(module)
    stream, first, second = TorchStream(None, module.Event), Tensors(), Tensors()
    kept = weakref.ref(first)
    streams.keep_alive(first, stream)
    del first
    streams.synchronize()
    assert kept() is not None, "the stream has not passed"
    passed.append(True)
    streams.keep_alive(second, stream)
    assert kept() is None


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


def test_a_module_without_graphs_says_so(module: Module) -> None:
    with pytest.raises(
        BackendError, match=r"torch.mtia has no graphs \(.*Graph'\): declare graph_capture=Fal"
    ):
        TorchStreams(module)._new_graph()
    module.Graph = Mock(side_effect=RuntimeError)
    with pytest.raises(BackendError, match=r"torch.mtia has no graphs \(\)"):
        TorchStreams(module)._new_graph()


@pytest.mark.parametrize("most", ["rowwise", "tensorwise", "none"])
def test_scales_are_those_that_torch_takes(most: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A double: torch 2.11 refuses scales of rows on CPUs by an internal assertion, a RuntimeError."""

    def multiply(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, *_: Any, **__: Any) -> None:
        if most == "none" or (most == "tensorwise" and scale_a.numel() > 1):
            raise RuntimeError("INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    assert scaling_of("cpu") == most
