"""Collectives through shared memory: dtypes, differing calls, dead ranks, leftovers, and gloo instead."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelz import CollectiveError
from accelz.conformance.cluster import Clusters, Context
from accelz_cpu import native
from accelz_cpu.channel import Channel
from accelz_cpu.shared_memory import SharedMemoryCollectives
from accelz_cpu.transport import Transport

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if native.library() is None:
        pytest.skip("the native library was not built here")


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    made = Clusters("cpu", timeout=10.0)
    yield made
    made.stop()


@pytest.fixture
def disposable() -> Iterator[Clusters]:
    """Ranks that are of no use to later tests."""
    made = Clusters("cpu", timeout=5.0)
    yield made
    made.stop()


def collectives(context: Context) -> SharedMemoryCollectives:
    calls = context.accelerator.collectives
    assert isinstance(calls, SharedMemoryCollectives)
    return calls


def transport(context: Context) -> Transport:
    made = collectives(context).transport(context.group)
    assert made is not None
    return made


def reductions_body(context: Context) -> None:
    calls, size = collectives(context), context.size
    for dtype in (*FLOATS, *INTEGERS):
        for n in (1, 130, 70_001):
            rows = (torch.arange(size * n * size).reshape(size, -1) * 7 % 50).to(dtype)
            for op, expected in (("sum", rows.sum(0)), ("max", rows.amax(0)), ("min", rows.amin(0))):
                mine, output = rows[context.rank].clone(), torch.zeros(n, dtype=dtype)
                calls.reduce_scatter(output, mine, context.group, op)  # type: ignore[arg-type]
                whole = expected.to(dtype)
                assert torch.equal(output, whole[context.rank * n :][:n]), (dtype, n, op)
                calls.all_reduce(mine, context.group, op)  # type: ignore[arg-type]
                assert torch.equal(mine, whole), (dtype, n, op)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reductions_of_every_dtype(clusters: Clusters, size: int) -> None:
    clusters(size).run(reductions_body)


def order_body(context: Context) -> tuple[bool, bool, bytes]:
    """16-bit sums against fp32 ones in rank order, and what this rank got."""
    calls = collectives(context)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(context.size, 5000, generator=generator) * 10.0 ** torch.arange(context.size)[:, None]
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        parts = rows.to(dtype)
        expected = parts[0].float()
        for part in parts[1:]:
            expected = expected + part.float()
        mine = parts[context.rank].clone()
        calls.all_reduce(mine, context.group)
        found.append(torch.equal(mine, expected.to(dtype)))
    total = rows[context.rank].clone()
    calls.all_reduce(total, context.group)
    return found[0], found[1], total.numpy().tobytes()


def test_sums_are_made_in_rank_order_and_rounded_once(clusters: Clusters) -> None:
    first, *others = clusters(3).run(order_body)
    assert first[:2] == (True, True)
    assert all(other == first for other in others), "the same bits on all ranks"


def nan_body(context: Context) -> list[bool]:
    calls = collectives(context)
    values = torch.tensor([1.0, float("nan"), 3.0]) if context.rank == 1 else torch.ones(3)
    results = []
    for op in ("sum", "max", "min"):
        mine = values.clone()
        calls.all_reduce(mine, context.group, op)  # type: ignore[arg-type]
        results.append(mine.isnan().tolist() == [False, True, False])
    return results


def test_nan_is_kept(clusters: Clusters) -> None:
    assert clusters(3).run(nan_body) == [[True] * 3] * 3


def movements_body(context: Context) -> None:
    """Dtypes that are only copied, those that the library cannot sum, and tensors that are not contiguous."""
    calls = collectives(context)
    flags = torch.tensor([True, False]) if context.rank else torch.tensor([False, False])
    gathered = torch.zeros(4, dtype=torch.bool)
    calls.all_gather(gathered, flags, context.group)
    assert gathered.tolist() == [False, False, True, False]
    value = torch.full((3,), complex(context.rank, 1))
    calls.broadcast(value, 1, context.group)
    assert torch.equal(value, torch.full((3,), complex(1, 1)))
    parts, swapped = torch.full((5,), complex(0, context.rank)), torch.zeros(5, dtype=torch.complex64)
    counts = [2, 3] if context.rank == 0 else [3, 2]
    calls.all_to_all(swapped, parts, counts, counts, context.group)
    assert swapped.imag.tolist() == [0] * counts[0] + [1] * counts[1]
    assert not calls._lanes  # nothing has gone over gloo
    small = torch.ones(4, dtype=torch.int8)
    calls.all_reduce(small, context.group)
    assert torch.equal(small, torch.full((4,), 2, dtype=torch.int8))
    with pytest.raises(CollectiveError, match=r"pass \.contiguous\(\)"):
        calls.all_reduce(torch.ones(6)[::2], context.group)


def test_other_dtypes_and_layouts(clusters: Clusters) -> None:
    clusters(2).run(movements_body)


def differing_body(context: Context) -> str:
    calls = collectives(context)
    mine = [
        lambda: calls.all_gather(torch.zeros(20), torch.zeros(10), context.group),
        lambda: calls.broadcast(torch.zeros(7, dtype=torch.float64), 0, context.group),
    ][context.rank]
    with pytest.raises(CollectiveError) as caught:
        mine()
    with pytest.raises(CollectiveError, match=r"earlier failure|gave up"):
        calls.all_reduce(torch.zeros(1), context.group)
    return str(caught.value)


def test_ranks_that_differ_are_both_told_what_the_other_did(disposable: Clusters) -> None:
    start = time.monotonic()
    for message in disposable(2).run(differing_body):
        assert "all_gather of 80 bytes (float32) on rank 0" in message
        assert "broadcast of 56 bytes (float64, from rank 0) on rank 1" in message
    assert time.monotonic() - start < 30


def unequal_body(context: Context) -> str:
    """Rank 1 expects one element more than rank 0 sends."""
    calls = collectives(context)
    received = [2, 2] if context.rank == 0 else [3, 2]
    output, parts = torch.zeros(sum(received)), torch.zeros(4)
    exchange = partial(calls.all_to_all, output, parts, received, [2, 2], context.group)
    if context.rank == 0:  # it has what it expects
        exchange()
    with pytest.raises(CollectiveError) as caught:
        calls.barrier(context.group) if context.rank == 0 else exchange()
    return str(caught.value)


def test_ranks_that_expect_what_is_not_sent(disposable: Clusters) -> None:
    for said in disposable(2).run(unequal_body):
        assert "rank 0 sends 2 elements to rank 1, which expects 3" in said


def victim_body(context: Context) -> tuple[str, float, set[str], list[str]]:
    """Rank 1 is killed while it holds large blocks and others wait for it."""
    calls = collectives(context)
    whole, shard = torch.zeros(3 * MIB), torch.ones(MIB)
    calls.all_gather(whole, shard, context.group)
    calls.barrier(context.group)  # everyone has read it: what a dead rank published may be gone
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        calls.all_gather(whole, shard, context.group)
    seconds = time.monotonic() - start
    lines = Path("/proc/self/maps").read_text().splitlines()
    named = [line for line in lines if "/dev/shm" in line and not line.endswith("(deleted)")]
    return str(caught.value), seconds, _segments(lines), named


def test_a_killed_rank_is_noticed_early_and_leaves_nothing_behind(disposable: Clusters) -> None:
    cluster = disposable(3)
    outcomes = cluster.outcomes(victim_body, limit=30)
    assert [o.status for o in outcomes] == ["returned", "died", "returned"]
    segments: set[str] = set()
    for outcome in (outcomes[0], outcomes[2]):
        message, seconds, seen, named = outcome.value
        assert "rank 1 (process " in message
        assert seconds < 4.0, "a dead process is looked for, not waited for: the timeout is 5 s"
        assert named == [], "no segment has a name that somebody would have to remove"
        segments |= seen
    assert len(segments) >= 6, "a mailbox and a block of each rank"
    cluster.stop()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            held = _segments(maps.read_text().splitlines())
        except OSError:  # a process that has ended meanwhile
            continue
        assert not held & segments, maps


def _segments(lines: list[str]) -> set[str]:
    """Inodes of the segments among the lines of a process's maps."""
    return {line.split()[4] for line in lines if "/memfd:accelz" in line}


def private_body(context: Context) -> list[str]:
    """Who may open this rank's segments."""
    transport(context)
    modes = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:accelz" in os.readlink(descriptor):
                modes.append(oct(os.stat(descriptor).st_mode & 0o777))
        except OSError:
            continue
    return modes


def test_segments_belong_to_the_user_alone(clusters: Clusters) -> None:
    for modes in clusters(2).run(private_body):
        assert modes
        assert set(modes) == {"0o600"}


def short_of_memory_body(context: Context, poor: int) -> tuple[list[str], bool, list[float]]:
    """One rank cannot have shared memory: a limit on file sizes holds for anonymous files too."""
    calls = collectives(context)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if context.rank == poor:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group = calls.new_group(None, 10.0)
        assert group is not None
        values = torch.full((1000,), float(context.rank))
        calls.all_reduce(values, group)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    gathered = torch.zeros(context.size)
    calls.all_gather(gathered, torch.tensor([float(context.rank)]), group)
    said = [str(w.message) for w in caught if "cannot share memory" in str(w.message)]
    return said, calls.transport(group) is None, [values[0].item(), *gathered.tolist()]


@pytest.mark.parametrize("poor", [0, 1])
def test_where_one_rank_has_no_memory_all_use_gloo(clusters: Clusters, poor: int) -> None:
    found = clusters(2).run(short_of_memory_body, poor=poor)
    assert all(gloo for _, gloo, _ in found)
    assert all(values == [1.0, 0.0, 1.0] for *_, values in found)
    assert len(found[0][0]) == 1
    assert f"rank {poor}: cannot" in found[0][0][0]
    assert found[1][0] == [], "one warning, from rank 0"


def memory_body(context: Context) -> tuple[int, int]:
    """Bytes held after one large message, and after many small ones."""
    calls = collectives(context)
    calls.broadcast(torch.zeros(16 * MIB, dtype=torch.uint8), 0, context.group)
    peak = transport(context).nbytes()
    for _ in range(600):
        calls.all_gather(torch.zeros(2000), torch.zeros(1000), context.group)
    return peak, transport(context).nbytes()


def test_memory_that_is_no_longer_needed_is_given_back(clusters: Clusters) -> None:
    (peak, after), _ = clusters(2).run(memory_body)
    assert peak > 16 * MIB
    assert after < 2 * MIB  # what a rank has read late is kept a while


def failing_growth_body(context: Context) -> str:
    calls = collectives(context)
    calls.barrier(context.group)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if context.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    with pytest.raises(CollectiveError) as caught:
        calls.all_gather(torch.zeros(8 * MIB), torch.zeros(4 * MIB), context.group)
    return str(caught.value)


def test_memory_that_runs_out_later_is_an_error_on_all_ranks(disposable: Clusters) -> None:
    first, second = disposable(2).run(failing_growth_body)
    assert first.startswith("rank 1 gave up: cannot")
    assert "bytes of shared memory" in second


def forked_body(context: Context) -> int:
    calls = collectives(context)
    calls.barrier(context.group)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            calls.barrier(context.group)
        except CollectiveError as error:
            code = 0 if "forked process" in str(error) else 2
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    calls.barrier(context.group)  # the child has disturbed nothing
    return status


def test_a_forked_child_is_none_of_the_ranks(clusters: Clusters) -> None:
    assert clusters(2).run(forked_body) == [0, 0]


def held_by_child_body(context: Context) -> int:
    """How much of the group's shared memory a forked child could keep alive: descriptors and mappings."""
    calls = collectives(context)
    calls.all_gather(torch.zeros(2 * MIB), torch.zeros(MIB), context.group)
    child = os.fork()
    if child == 0:
        descriptors = [os.readlink(d) for d in Path("/proc/self/fd").iterdir() if d.is_symlink()]
        os._exit(sum("memfd:accelz" in line for line in [*descriptors, *_maps()]))
    status = os.waitpid(child, 0)[1]
    calls.barrier(context.group)
    return os.waitstatus_to_exitcode(status)


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def test_a_forked_child_keeps_no_memory_of_a_group_alive(clusters: Clusters) -> None:
    """A data loader's worker may outlive the group."""
    assert clusters(2).run(held_by_child_body) == [0, 0]


def waiters_body(context: Context) -> int:
    """Wrong sums where several threads wait for one collective."""
    calls, wrong = collectives(context), 0

    def wait_and_look() -> None:
        nonlocal wrong
        begin.wait()
        handle.wait()
        wrong += not bool((values == context.size).all())

    for _ in range(10):
        values = torch.ones(1 << 20)
        handle = calls.all_reduce(values, context.group, async_op=True)
        begin = threading.Barrier(2)
        threads = [threading.Thread(target=wait_and_look) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return wrong


def test_several_threads_wait_for_one_collective(clusters: Clusters) -> None:
    assert clusters(2).run(waiters_body) == [0, 0]


def leaving_body(context: Context) -> float:
    """Rank 1 leaves at once; rank 0 reads what it left a little later."""
    calls = collectives(context)
    whole = torch.zeros(2 * MIB)
    handle = calls.all_gather(
        whole, torch.full((MIB,), float(context.rank + 1)), context.group, async_op=True
    )
    if context.rank == 0:
        time.sleep(0.5)
        handle.wait()
    else:
        handle.wait()
        calls.destroy()
    return whole[-1].item()


def test_who_leaves_waits_until_its_data_have_been_read(disposable: Clusters) -> None:
    assert disposable(2).run(leaving_body) == [2.0, 2.0]


def test_a_new_job_after_destroy() -> None:
    library = native.library()
    assert library is not None
    from accelz_cpu.common_memory import CommonMemory

    calls = SharedMemoryCollectives(library, CommonMemory(torch.device("cpu")))
    for _ in range(2):
        group = calls.init(10.0, 0, 1, dist.HashStore())
        value = torch.ones(3)
        calls.all_reduce(value, group)
        assert torch.equal(value, torch.ones(3))
        stale: Any = calls.transport(group)
        calls.destroy()
        with pytest.raises(RuntimeError, match="destroyed"):
            stale.nbytes()


def closing_body(context: Context) -> str:
    """A channel that is closed while another thread waits in it."""
    calls, shard = collectives(context), torch.ones(1000)
    calls.all_gather(torch.zeros(2000), shard, context.group)
    if context.rank == 1:
        context.group.store.wait(["closed"], timedelta(seconds=30))
        return ""
    handle = calls.all_gather(torch.zeros(2000), shard, context.group, async_op=True)
    found: list[BaseException] = []

    def wait() -> None:
        try:
            handle.wait()
        except CollectiveError as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    channel = transport(context)
    assert isinstance(channel, Channel)
    while not channel._calls:
        time.sleep(0.01)
    calls._close_transports()
    context.group.store.set("closed", "")
    thread.join()
    return str(found)


def test_a_channel_that_closes_under_a_waiting_thread(
    disposable: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has its error in the end, and nothing that it uses is freed before."""
    monkeypatch.setattr("accelz_cpu.channel.LINGER_SECONDS", 0.5)  # ranks are forked from here
    first, _ = disposable(2).run(closing_body, limit=30)
    assert "CollectiveError" in first
