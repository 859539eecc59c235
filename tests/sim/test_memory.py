"""The allocator: it counts bytes exactly, enforces a limit, and poisons memory that is not in use."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

from accelz import Accelerator
from tests.simulated import capacity

from .on_sim import on_sim

MIB = 1 << 20


def _allocated(accelerator: Accelerator) -> int:
    gc.collect()
    return accelerator.memory.stats().allocated


@on_sim
def test_live_bytes_are_those_of_the_tensors(accelerator: Accelerator) -> None:
    before = _allocated(accelerator)
    first = torch.empty(1001, dtype=torch.bfloat16, device=accelerator.device)
    second = torch.empty(3, 5, dtype=torch.float64, device=accelerator.device)
    nothing = torch.empty(0, device=accelerator.device)
    view = first[3:7]
    assert _allocated(accelerator) == before + 2002 + 120
    del first, nothing
    assert _allocated(accelerator) == before + 2002 + 120, "a view keeps its storage"
    del view
    assert _allocated(accelerator) == before + 120
    del second
    assert _allocated(accelerator) == before


@on_sim
def test_peak_is_the_most_at_any_moment(accelerator: Accelerator) -> None:
    before = _allocated(accelerator)
    accelerator.memory.reset_peak()
    kept = torch.empty(100, dtype=torch.uint8, device=accelerator.device)
    torch.empty(1000, dtype=torch.uint8, device=accelerator.device)
    torch.empty(10, dtype=torch.uint8, device=accelerator.device)
    assert accelerator.memory.stats().peak == before + 1100
    accelerator.memory.reset_peak()
    assert accelerator.memory.stats().peak == before + 100
    del kept


@on_sim
def test_a_storage_that_is_resized_is_counted_exactly(accelerator: Accelerator) -> None:
    before = _allocated(accelerator)
    data = torch.arange(64.0, device=accelerator.device)
    storage = data.untyped_storage()
    storage.resize_(0)
    assert _allocated(accelerator) == before
    storage.resize_(256)
    assert _allocated(accelerator) == before + 256
    data.copy_(torch.arange(64.0))
    storage.resize_(512)
    assert _allocated(accelerator) == before + 512
    assert torch.equal(data.cpu(), torch.arange(64.0)), "growing keeps the content"
    storage.resize_(40)
    assert _allocated(accelerator) == before + 40
    assert torch.equal(data[:10].cpu(), torch.arange(10.0)), "shrinking keeps what still fits"


@on_sim
def test_reading_a_storage_that_was_dropped_raises(accelerator: Accelerator) -> None:
    data = torch.ones(8, device=accelerator.device)
    view = data[2:4]
    data.untyped_storage().resize_(0)
    for read in (data.sum, view.cpu, view.sum, lambda: data.fill_(1.0)):
        with pytest.raises(RuntimeError, match="no memory behind it"):
            read()


@on_sim
def test_more_than_the_capacity_is_out_of_memory(accelerator: Accelerator) -> None:
    with capacity(accelerator, accelerator.memory.stats().allocated + 2 * MIB):
        kept = torch.ones(MIB, dtype=torch.uint8, device=accelerator.device)
        with pytest.raises(torch.OutOfMemoryError, match=f"wanted {MIB + 1} bytes, free {MIB} of"):
            torch.empty(MIB + 1, dtype=torch.uint8, device=accelerator.device)
        with pytest.raises(torch.OutOfMemoryError):
            kept + torch.tensor(1.0, dtype=torch.float64)  # a result is device memory too
        assert accelerator.memory.stats().free == MIB
        del kept
        rest = torch.empty(2 * MIB, dtype=torch.uint8, device=accelerator.device)
        assert accelerator.memory.stats().free == 0
        del rest


@on_sim
def test_a_parameter_takes_no_host_data(accelerator: Accelerator) -> None:
    parameter = nn.Parameter(torch.ones(3, device=accelerator.device))
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = torch.ones(3)
    with pytest.raises(RuntimeError, match="storage"):
        parameter.data.set_(torch.ones(3).untyped_storage())
    assert parameter.device == accelerator.device


@on_sim
def test_fresh_memory_is_poison(accelerator: Accelerator) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        fresh = torch.empty(100, dtype=dtype, device=accelerator.device)
        assert fresh.isnan().all(), "nobody must rely on what was there before"


@on_sim
def test_pinned_memory_is_known_by_any_of_its_addresses(accelerator: Accelerator) -> None:
    host = accelerator.memory.empty_host((100,), torch.float32)
    assert host.is_pinned()
    assert host[50:].is_pinned()
    assert not torch.empty(100).is_pinned()
    assert torch.ones(3).pin_memory().is_pinned()


@on_sim
def test_each_device_counts_for_itself(accelerator: Accelerator) -> None:
    before = _allocated(accelerator)
    other = torch.arange(6.0, device="sim:1")
    assert _allocated(accelerator) == before
    here = other.to("sim:0")
    assert _allocated(accelerator) == before + 24
    assert torch.equal((here + 1).to("sim:1").cpu(), torch.arange(6.0) + 1)
    with pytest.raises(RuntimeError, match="no device sim:2"):
        torch.empty(1, device="sim:2")
    accelerator.bind(1)
    try:
        assert accelerator.device == torch.device("sim:1")
        assert accelerator.memory.stats().allocated == 24
    finally:
        accelerator.bind(0)


@on_sim
def test_threads_may_free_at_one_time(accelerator: Accelerator) -> None:
    """What one thread frees goes to no other before it is poisoned; the process would die otherwise."""
    before = _allocated(accelerator)

    def work(seed: int) -> None:
        sizes = torch.randint(1, 3000, (4000,), generator=torch.Generator().manual_seed(seed)).tolist()
        held: list[torch.Tensor] = []
        for numel in sizes:
            held.append(torch.empty(numel, device=accelerator.device))
            del held[:-8]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _allocated(accelerator) == before
