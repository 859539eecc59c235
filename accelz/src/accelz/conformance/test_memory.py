"""The memory role: counters that follow allocations, and host memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from accelz.accelerator import Accelerator
from accelz.conformance.contract import expect, expect_close, expect_raises, named
from accelz.conformance.fixtures import last_device
from accelz.conformance.marks import about, needs, over_dtypes, proves
from accelz.roles.memory import MemoryStats

MIB = 1 << 20
MOST_TAKEN = 8 << 30
"""Bytes at most that a test fills a device with: a simulated device takes its memory from the host."""


class MemoryContract:
    """nbytes: what the tests allocate, well above an allocator's granularity and the counters' own noise."""

    nbytes = 24 * MIB

    def allocate(self, accelerator: Accelerator) -> Tensor:
        """Allocate and write `nbytes` on the device, so that a counter of resident bytes sees them."""
        block = torch.full((self.nbytes,), 1, dtype=torch.uint8, device=accelerator.device)
        accelerator.streams.synchronize()
        return block

    def settled(self, accelerator: Accelerator) -> MemoryStats:
        """Return the counters once nothing is left to free."""
        gc.collect()
        accelerator.streams.synchronize()
        accelerator.memory.trim()
        return accelerator.memory.stats()

    @about("Memory.stats")
    def test_counters_make_sense(self, accelerator: Accelerator) -> None:
        """0 ≤ allocated ≤ peak, 0 ≤ free ≤ capacity, all of them whole bytes."""
        stats = accelerator.memory.stats()
        numbers = (stats.allocated, stats.peak, stats.capacity, stats.free)
        came = str(stats)
        expect(all(isinstance(n, int) for n in numbers), "Memory.stats", "every counter must be an int", came)
        expect(0 <= stats.allocated <= stats.peak, "Memory.stats", "0 ≤ allocated ≤ peak", came)
        expect(0 <= stats.free <= stats.capacity, "Memory.stats", "0 ≤ free ≤ capacity", came)
        expect(stats.capacity > 0, "Memory.stats", "capacity must be what this process may use", came)

    @about("Memory.stats")
    def test_allocated_follows_an_allocation(self, accelerator: Accelerator) -> None:
        """allocated grows by the bytes that are allocated and written, and falls when they are freed."""
        before = self.settled(accelerator).allocated
        block = self.allocate(accelerator)
        grown = accelerator.memory.stats().allocated - before
        expect(grown > 0.9 * self.nbytes, "Memory.stats", f"allocated must grow by {self.nbytes}", f"{grown}")
        del block
        left = self.settled(accelerator).allocated - before
        expect(left < 0.5 * self.nbytes, "Memory.stats", "allocated must fall after a free", f"{left} left")

    @about("Memory.stats")
    @proves("exact_memory")
    def test_allocated_is_exact(self, accelerator: Accelerator) -> None:
        """allocated counts bytes as they are allocated, touched or not, to within the granularity."""
        granularity = accelerator.capabilities.memory_granularity
        before = self.settled(accelerator).allocated
        block = torch.empty(self.nbytes, dtype=torch.uint8, device=accelerator.device)
        grown = accelerator.memory.stats().allocated - before
        exact = self.nbytes <= grown < self.nbytes + granularity
        wanted = f"allocated must grow by {self.nbytes}, or by less than {granularity} bytes more"
        expect(exact, "Memory.stats", wanted, f"by {grown}", "declare its memory_granularity")
        del block
        left = self.settled(accelerator).allocated - before
        expect(left == 0, "Memory.stats", "allocated must be what it was before", f"{left} bytes more")

    @about("Memory.stats")
    @needs("exact_memory")
    def test_free_falls_with_an_allocation(self, accelerator: Accelerator) -> None:
        """Allocated bytes are not free: `free` falls by them, and `capacity` stays."""
        before = self.settled(accelerator)
        block = self.allocate(accelerator)
        after = accelerator.memory.stats()
        fallen = before.free - after.free
        came = f"by {fallen}"
        expect(fallen > 0.5 * self.nbytes, "Memory.stats", f"free must fall by {self.nbytes}", came)
        same = after.capacity == before.capacity
        expect(same, "Memory.stats", f"capacity must stay {before.capacity}", f"{after.capacity}")
        del block

    @about("Memory.stats")
    def test_counters_are_those_of_the_bound_device(self, accelerator: Accelerator) -> None:
        """After bind() to another device, the counters follow allocations there."""
        with last_device(accelerator):
            self.test_allocated_follows_an_allocation(accelerator)

    @about("Memory.stats")
    @needs("exact_memory")
    def test_what_is_free_can_be_allocated(self, accelerator: Accelerator) -> None:
        """Nine tenths of `free` can be allocated, on a device that counts single bytes: others have blocks,
        which may be apart, and other processes."""
        free = self.settled(accelerator).free
        if accelerator.capabilities.memory_granularity > 1 or free > MOST_TAKEN:
            pytest.skip(f"asked for only where single bytes count and at most {MOST_TAKEN} are free")
        wanted = free * 9 // 10
        with named("Memory.stats", f"free is {free} bytes, so {wanted} must find room"):
            torch.empty(wanted, dtype=torch.uint8, device=accelerator.device)

    @about("Memory")
    @needs("exact_memory")
    def test_running_out_is_an_error_of_its_kind(self, accelerator: Accelerator) -> None:
        """Asking for more than the device has raises torch.OutOfMemoryError; then it works as before."""
        wanted = 2 * self.settled(accelerator).capacity

        def ask() -> None:
            torch.empty(wanted, dtype=torch.uint8, device=accelerator.device)
            accelerator.streams.synchronize()

        self.check_running_out(accelerator, f"a tensor of {wanted} bytes", ask)

    @about("Memory")
    @needs("exact_memory", "storage_resize")
    def test_a_storage_that_finds_no_room_stays_as_it_is(self, accelerator: Accelerator) -> None:
        """A storage that cannot grow raises torch.OutOfMemoryError too, and keeps its contents."""
        wanted = 2 * self.settled(accelerator).capacity
        values = torch.arange(1000.0, device=accelerator.device)
        storage = values.untyped_storage()
        self.check_running_out(accelerator, f"a storage of {wanted} bytes", lambda: storage.resize_(wanted))
        expect(storage.nbytes() == 4000, "Memory", "the storage must keep its size", str(storage.nbytes()))
        expect_close(values, torch.arange(1000.0), "Memory", "the storage must keep its content")

    def check_running_out(self, accelerator: Accelerator, what: str, ask: Callable[[], object]) -> None:
        before = accelerator.memory.stats().allocated
        do = "raise torch.OutOfMemoryError, or declare exact_memory=False"
        expect_raises(torch.OutOfMemoryError, "Memory", f"{what} is more than there is", ask, do)
        left = self.settled(accelerator).allocated - before
        expect(left == 0, "Memory", "an allocation that fails must keep nothing", f"{left} bytes")
        expect_close(self.allocate(accelerator)[:3], torch.ones(3), "Memory", "must still work afterwards")

    @about("Memory.reset_peak", "Memory.stats")
    def test_peak_and_its_reset(self, accelerator: Accelerator) -> None:
        """peak remembers a freed block until reset_peak(), and restarts from what is allocated."""
        before = self.settled(accelerator)
        accelerator.memory.reset_peak()
        block = self.allocate(accelerator)
        if not accelerator.capabilities.exact_memory:
            accelerator.memory.stats()  # a backend that finds its peak by sampling must have sampled it
        del block
        after = self.settled(accelerator)
        grown = after.peak - before.allocated
        expected = f"peak must hold {self.nbytes} more"
        expect(grown > 0.9 * self.nbytes, "Memory.stats", expected, f"{grown} more")
        accelerator.memory.reset_peak()
        fresh = accelerator.memory.stats()
        above = fresh.peak - fresh.allocated
        expected = "peak must start from allocated"
        expect(above < 0.5 * self.nbytes, "Memory.reset_peak", expected, f"{above} above")

    @about("Memory.trim")
    def test_trim_keeps_live_data(self, accelerator: Accelerator) -> None:
        """trim() gives back unused memory and nothing else."""
        live = torch.arange(1000.0, device=accelerator.device)
        del_me = self.allocate(accelerator)
        del del_me
        accelerator.memory.trim()
        expect_close(live, torch.arange(1000.0), "Memory.trim", "live tensors must keep their values")

    @about("Memory.empty_host")
    @pytest.mark.parametrize("shape", [(), (0,), (1,), (1025,), (3, 5, 7)], ids=str)
    @over_dtypes()
    def test_host_memory_round_trip(
        self, accelerator: Accelerator, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """A host tensor of the requested shape and dtype carries values to the device and back."""
        host = accelerator.memory.empty_host(shape, dtype)
        back = accelerator.memory.empty_host(shape, dtype)
        came = f"{tuple(host.shape)} {host.dtype} on {host.device}"
        fits = tuple(host.shape) == shape and host.dtype == dtype and host.device.type == "cpu"
        expect(fits, "Memory.empty_host", f"must be a host tensor {shape} of {dtype}", came)
        host.copy_(torch.rand(shape))
        kept = host.clone()
        on_device = torch.empty(shape, dtype=dtype, device=accelerator.device)
        on_device.copy_(host, non_blocking=True)
        back.copy_(on_device, non_blocking=True)
        accelerator.streams.synchronize()
        expect_close(back, kept, "Memory.empty_host", "values must come back from the device unchanged")

    @about("Memory.empty_host")
    @proves("pinned_host_memory")
    def test_host_memory_is_pinned(self, accelerator: Accelerator) -> None:
        """If pinned_host_memory is declared, empty_host() returns page-locked memory."""
        host = accelerator.memory.empty_host((4096,), torch.float32)
        expect(host.is_pinned(), "Memory.empty_host", "must be page-locked", "pageable memory")

    @about("Memory.empty_host")
    @needs("pinned_host_memory", "asynchronous")
    def test_copies_from_pinned_memory_keep_their_order(self, accelerator: Accelerator) -> None:
        """Asynchronous copies on one stream happen in order, each with its own values."""
        hosts = [accelerator.memory.empty_host((MIB,), torch.float32).fill_(i) for i in range(4)]
        target = torch.empty(MIB, device=accelerator.device)
        copies = []
        for host in hosts:
            target.copy_(host, non_blocking=True)
            copies.append(target.clone())
        accelerator.streams.synchronize()
        for i, copy in enumerate(copies):
            expected = f"copy {i} must be in order"
            expect_close(copy, torch.full((MIB,), float(i)), "Memory.empty_host", expected)


class TestMemory(MemoryContract):
    pass
