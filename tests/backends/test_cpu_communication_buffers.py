"""Communication buffers on the CPU: what is read in place, when it is used again, where there is none."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from accelz.conformance.cluster import Clusters, Context
from accelz_cpu import native
from accelz_cpu.shared_memory import SharedMemoryCollectives

MIB = 1 << 20
MAP_FIXED_NOREPLACE = 0x100000
"""Of Linux; Python's mmap does not name it."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if native.library() is None:
        pytest.skip("the native library was not built here")


@pytest.fixture
def fresh() -> Iterator[Clusters]:
    """Ranks that no other test uses, before or after."""
    made = Clusters("cpu", timeout=5.0)
    yield made
    made.stop()


def connected(context: Context) -> SharedMemoryCollectives:
    calls = context.accelerator.collectives
    assert isinstance(calls, SharedMemoryCollectives)
    calls.connect(context.group, context.accelerator.device)
    return calls


def empty(context: Context, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return context.accelerator.collectives.empty(numel, dtype, context.accelerator.device, context.group)


def held(context: Context) -> int:
    calls = context.accelerator.collectives
    assert isinstance(calls, SharedMemoryCollectives)
    transport = calls.transport(context.group)
    assert transport is not None
    return transport.nbytes()


def bits_body(context: Context) -> None:
    calls, size = connected(context), context.size
    generator = torch.Generator().manual_seed(context.rank)
    for dtype in FLOATS:
        for n in (1, 100, 3001, 70_001):
            plain = (torch.randn(n * size, generator=generator) * 10.0**context.rank).to(dtype)
            want, got = torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype)
            calls.reduce_scatter(want, plain, context.group)
            for without in range(-1, size):  # one rank's input may be elsewhere
                elsewhere = context.rank == without
                full = plain if elsewhere else empty(context, n * size, dtype).copy_(plain)
                calls.reduce_scatter(got, full, context.group)
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (dtype, n, without)
                assert torch.equal(full, plain)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_have_the_same_bits(cluster: Clusters, size: int) -> None:
    cluster(size).run(bits_body)


def copies_body(context: Context) -> tuple[int, int]:
    """Bytes of shared memory that a reduction from lent memory takes, and one from other memory."""
    calls, n = connected(context), 4 * MIB
    output, full = torch.empty(n), empty(context, n * context.size).fill_(1)
    found = []
    for each in (full, full.clone()):
        before = held(context)
        calls.reduce_scatter(output, each, context.group)
        found.append(held(context) - before)
        assert torch.equal(output, torch.full((n,), float(context.size)))
    return found[0], found[1]


def test_nothing_is_copied(fresh: Clusters) -> None:
    assert fresh(2).run(copies_body) == [(0, 16 * MIB)] * 2


def readers_body(context: Context) -> tuple[bool, bool]:
    """Whether the first rank got the same memory again before the other had read it, and after."""
    calls, n = connected(context), MIB
    output, full = torch.empty(n), empty(context, 2 * n).fill_(1)
    handle, first = calls.reduce_scatter(output, full, context.group, async_op=True), full.data_ptr()
    if context.rank == 0:
        handle.wait()
    del full
    second = empty(context, 2 * n).data_ptr() if context.rank == 0 else 0
    calls.barrier(context.group)
    handle.wait()
    calls.barrier(context.group)
    third = [empty(context, 2 * n) for _ in range(2)]
    return second == first, first in [each.data_ptr() for each in third]


def test_memory_is_given_out_again_when_it_has_been_read(cluster: Clusters) -> None:
    (before, after), _ = cluster(2).run(readers_body)
    assert (before, after) == (False, True)


def forked_body(context: Context) -> int:
    calls = connected(context)
    full = empty(context, MIB)
    calls.destroy()  # now only the buffer keeps its memory mapped
    place = full.data_ptr()
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
        readable = mmap.PROT_READ | mmap.PROT_WRITE
        there = libc.mmap(ctypes.c_void_p(place), ctypes.c_size_t(mmap.PAGESIZE), readable, anonymous, -1, 0)
        del full  # as a data loader's worker drops what it has inherited
        os._exit(0 if there == place and ctypes.string_at(place, 1) == b"\0" else 1)
    status = os.waitpid(child, 0)[1]
    assert full.fill_(3).sum() == 3 * MIB
    return status


def test_a_forked_child_unmaps_nothing(fresh: Clusters) -> None:
    """It does not inherit the memory, so there may be its own where that was."""
    assert fresh(2).run(forked_body) == [0, 0]


def outliving_body(context: Context) -> float:
    calls = connected(context)
    full = empty(context, MIB)
    calls.destroy()
    return full.fill_(1).sum().item()


def test_buffers_outlive_their_group(fresh: Clusters) -> None:
    assert fresh(2).run(outliving_body) == [float(MIB)] * 2


def short_body(context: Context) -> float:
    calls, n = connected(context), 4 * MIB
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    taken = held(context)
    full = empty(context, n)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert held(context) == taken
    output = torch.empty(n // context.size)
    calls.reduce_scatter(output, full.fill_(1), context.group)
    assert empty(context, n).fill_(1).sum() == n
    return output.mean().item()


def test_without_shared_memory_they_are_ordinary(fresh: Clusters) -> None:
    assert fresh(2).run(short_body) == [2.0, 2.0]


def strange_body(context: Context) -> float:
    calls = context.accelerator.collectives
    group = calls.new_group(None, 10.0)
    assert group is not None
    full = calls.empty(2 * MIB, torch.float32, context.accelerator.device, group).fill_(1)  # before `connect`
    output = torch.empty(MIB)
    calls.reduce_scatter(output, full, group)
    assert calls.empty(0, torch.float32, context.accelerator.device, group).shape == (0,)
    return output.mean().item()


def test_a_rank_may_ask_before_the_group_is_connected(cluster: Clusters) -> None:
    assert cluster(2).run(strange_body) == [2.0, 2.0]
