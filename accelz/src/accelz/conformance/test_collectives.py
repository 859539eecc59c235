"""The collectives role at 1, 2 and 4 ranks: values, places, order, groups, and ranks that fail.

The functions called `…_body` run on every rank. Values are whole numbers of either sign that need all bits of
their dtype's mantissa, while those to be summed are smaller, so that their sums need no more bits: sums are
exact, and any difference is an error.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from accelz.accelerator import Accelerator
from accelz.conformance.cluster import Cluster, Context, Outcome
from accelz.conformance.contract import checked, expect, expect_close, expect_raises, unguarded
from accelz.conformance.fixtures import require_devices, room_for_ranks
from accelz.conformance.marks import FLOATS, about, declares, dtype_name, needs, over_dtypes, proves, thorough
from accelz.conformance.work import long_work
from accelz.errors import CollectiveError
from accelz.ranks.group import Group
from accelz.roles.collectives import Collectives, Handle, ReduceOp

Clustered = Callable[[int], Cluster]
over_sizes = pytest.mark.parametrize(
    "size", [1, 2, pytest.param(4, marks=thorough)], ids=lambda n: f"{n} ranks"
)

LENGTHS = (0, 1, 3, 17, 1001, 65_537)
OFFSETS = (0, 1, 3)
MARK = 7.0
LATE_SECONDS = 1.0
BUSY_SECONDS = 0.1
GATHERED_BYTES, GATHERS = 16 << 20, 4
"""Bytes that each of two ranks gets from the other, and how often."""
ROUNDING = 1.05
"""Data sheets round: 64 GB/s for 16 lanes of PCIe 5, which are 63."""
FAULTS = {
    "dies": {2: "all_gather", 3: "broadcast", 4: "all_to_all"},
    "never comes": {2: "reduce_scatter", 4: "all_reduce"},
}
"""What the last rank does, and which collective the others are in then, by the number of ranks."""
FAULT_TIMEOUTS = {"gloo": 3.0, "a library": 10.0}
"""Seconds, which include the first use of a device's communication library."""
FAULT_GRACE = 12.0
"""Seconds after its timeout within which a collective must have failed."""

CALLS: dict[str, Callable[[Collectives, Tensor, Tensor, Group], Handle]] = {
    "all_gather": lambda c, full, shard, group: c.all_gather(full, shard, group, async_op=True),
    "reduce_scatter": lambda c, full, shard, group: c.reduce_scatter(shard, full, group, async_op=True),
    "all_reduce": lambda c, full, _, group: c.all_reduce(full, group, async_op=True),
    "broadcast": lambda c, full, _, group: c.broadcast(full, group.size - 1, group, async_op=True),
    "all_to_all": lambda c, full, shard, group: c.all_to_all(
        full, full.clone(), _each(shard, group), _each(shard, group), group, async_op=True
    ),
}
"""Each collective, on a buffer of n elements per rank and one of n. The last rank broadcasts."""
INTEGERS = (torch.uint8, torch.int64, torch.bool)
"""What is sent besides floats: 8-bit codes, and the buffers of modules."""


def pair_size(accelerator: Accelerator) -> int:
    """Two ranks if there are devices for them, else one."""
    return min(2, room_for_ranks(accelerator))


class CollectivesContract:
    @about("Collectives.all_gather")
    @over_sizes
    @over_dtypes(*FLOATS, torch.uint8)
    def test_all_gather(self, cluster: Clustered, size: int, dtype: torch.dtype) -> None:
        """Shards of any length land at their rank's place, at any offset, in place or not, async or not."""
        cluster(size).run(all_gather_body, dtype=dtype)

    @about("Collectives.reduce_scatter")
    @over_sizes
    @over_dtypes()
    def test_reduce_scatter(self, cluster: Clustered, size: int, dtype: torch.dtype) -> None:
        """Each rank gets its slice of the sum, maximum or minimum; the full buffer's length may be odd."""
        cluster(size).run(reduce_scatter_body, dtype=dtype)

    @about("Collectives.all_to_all")
    @over_sizes
    @over_dtypes()
    def test_all_to_all(self, cluster: Clustered, size: int, dtype: torch.dtype) -> None:
        """Every rank gets what each rank sends it, in rank order; parts may have any length, also 0."""
        cluster(size).run(all_to_all_body, dtype=dtype)

    @about("Collectives.all_reduce")
    @over_sizes
    @over_dtypes()
    def test_all_reduce(self, cluster: Clustered, size: int, dtype: torch.dtype) -> None:
        """Every rank gets the same sum, maximum or minimum, in place, at any offset."""
        cluster(size).run(all_reduce_body, dtype=dtype)

    @about("Collectives.broadcast")
    @over_sizes
    def test_broadcast_from_each_rank(self, cluster: Clustered, size: int) -> None:
        """Every rank can be the source, for any dtype including integers; memory around the tensor stays."""
        cluster(size).run(broadcast_body)

    @about("Collectives.all_reduce", "Collectives.broadcast", "Collectives.all_gather")
    @over_sizes
    def test_host_tensors(self, cluster: Clustered, size: int) -> None:
        """A group takes host tensors too, including integers, in every reduction."""
        cluster(size).run(host_body)

    @about("Collectives.barrier", "Group.store")
    @over_sizes
    def test_barrier_waits_for_the_last(self, cluster: Clustered, size: int) -> None:
        """No rank leaves a barrier before the last has reached it; the store is shared."""
        cluster(size).run(barrier_body)

    @about("Handle.wait")
    @over_sizes
    @pytest.mark.parametrize("order", ["first to last", "last to first"])
    def test_async_handles_in_any_order(self, cluster: Clustered, size: int, order: str) -> None:
        """Several collectives in progress may be waited for in any order, and twice."""
        cluster(size).run(handles_body, backwards=order == "last to first")

    @about("Handle.wait")
    @over_sizes
    def test_buffers_outlive_the_caller(self, cluster: Clustered, size: int) -> None:
        """A handle keeps its input alive: dropping it before wait() changes no value."""
        cluster(size).run(dropped_body)

    @about(*(f"Collectives.{name}" for name in CALLS))
    @proves("async_collectives")
    def test_async_collectives_return_at_once(self, accelerator: Accelerator, cluster: Clustered) -> None:
        """With async_op=True the call returns before the other ranks have made it."""
        for name, seconds in cluster(2).run(late_body)[0].items():
            came = f"{seconds:.2f} s, the other rank arrived after {LATE_SECONDS} s"
            expect(seconds < LATE_SECONDS / 2, f"Collectives.{name}", "async_op=True must not wait", came)

    @about(*(f"Collectives.{name}" for name in CALLS), "Handle.wait")
    @needs("streams")
    @pytest.mark.parametrize("name", CALLS)
    @pytest.mark.parametrize("elsewhere", [False, True], ids=["waited for there", "waited for elsewhere"])
    def test_the_work_before_it_comes_first(
        self, accelerator: Accelerator, cluster: Clustered, name: str, elsewhere: bool
    ) -> None:
        """Called inside `use`, a collective reads its input after the work queued there, and work on the
        stream that waits, this or another one, sees what it wrote."""
        cluster(pair_size(accelerator)).run(side_stream_body, name=name, elsewhere=elsewhere)

    @about("Capabilities.link_bandwidth")
    def test_gathers_are_no_faster_than_the_links(self, cluster: Clustered) -> None:
        """An all-gather between two devices brings no more bytes in a second than are declared."""
        (declared, *_), *_ = found = cluster(2).run(gathers_body)
        if declared == 0:
            pytest.skip("link_bandwidth is not declared")
        where, do = "Capabilities.link_bandwidth", "declare what the data sheet says, in one direction"
        sound = isinstance(declared, (int, float)) and declared > 0
        expect(sound, where, "must be above 0", repr(declared), do)
        rounds = list(zip(*(seconds for _, seconds in found), strict=True))
        if not rounds:
            pytest.skip("2 devices, because no link is between ranks that share one")
        reached = GATHERED_BYTES / min(map(max, rounds))  # of each round, as the slowest rank has it
        expected = f"gathers must not exceed {declared:g} bytes in a second by more than its rounding"
        expect(reached <= ROUNDING * declared, where, expected, f"{reached:g}", do)

    @about("Collectives.empty", "Collectives.reduce_scatter")
    @needs("communication_buffers")
    @over_sizes
    @over_dtypes()
    def test_communication_buffers(self, cluster: Clustered, size: int, dtype: torch.dtype) -> None:
        """Buffers of any length give the same sums as others, wherever the input lies in them."""
        cluster(size).run(communication_body, dtype=dtype)

    @about("Collectives.empty")
    @needs("communication_buffers")
    @proves("communication_buffers")
    @over_sizes
    def test_communication_buffers_still_read_are_not_given_out(
        self, accelerator: Accelerator, cluster: Clustered, size: int
    ) -> None:
        """They are the backend's own. A dropped one is not given out again before all ranks have read it,
        however late they are."""
        own = type(unguarded(accelerator).collectives).empty is not Collectives.empty
        expected = "must be the backend's own where communication_buffers is declared"
        expect(own, "Collectives.empty", expected, "it is the base's, which gives ordinary memory")
        cluster(size).run(given_out_body)

    @about("Collectives.new_group", "Group")
    @over_sizes
    def test_groups_of_some_ranks(self, cluster: Clustered, size: int) -> None:
        """Groups over all ranks and over some: members communicate, the others get None."""
        cluster(size).run(groups_body)

    @about("Collectives.new_group", "Group")
    @over_sizes
    def test_groups_that_members_make(self, cluster: Clustered, size: int) -> None:
        """With members_only, ranks outside a group do not call, unless `member_groups` says it cannot be."""
        if not all(cluster(size).run(member_groups_body)):
            pytest.skip("not declared: Collectives.member_groups")

    @about("Collectives.init", "Group")
    @over_sizes
    def test_the_group_knows_its_place(self, cluster: Clustered, size: int) -> None:
        """rank and size are correct, and the timeout is the one given."""
        places = cluster(size).run(place_body)
        expect(places == [(r, size, 20.0) for r in range(size)], "Group", "rank, size, timeout", str(places))

    @about("Collectives.all_gather", "Collectives.reduce_scatter", "Collectives.all_to_all")
    @over_sizes
    def test_sizes_that_do_not_fit(self, cluster: Clustered, size: int) -> None:
        """Buffers that do not fit the group raise CollectiveError, and the group remains usable."""
        cluster(size).run(misfit_body)

    @about("Collectives.init", "Collectives.destroy")
    @pytest.mark.parametrize("environment", ["none", "torchrun"])
    def test_a_process_alone(
        self, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, environment: str
    ) -> None:
        """Without torchrun's environment or with it, init() joins the job and destroy() leaves it."""
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for _ in range(2):
            if environment == "torchrun":
                _set_torchrun(monkeypatch)
            group = accelerator.collectives.init(10.0)
            expect((group.rank, group.size) == (0, 1), "Collectives.init", "must be rank 0 of 1", str(group))
            value = torch.ones(3, device=accelerator.device)
            accelerator.collectives.all_reduce(value, group)
            accelerator.collectives.destroy()
            expect_close(value, torch.ones(3), "Collectives.all_reduce", "over one rank is the identity")

    @about(*(f"Collectives.{name}" for name in CALLS), "Collectives.barrier", "Collectives.check")
    @thorough
    @pytest.mark.parametrize("fault", FAULTS)
    @pytest.mark.usefixtures("devices_left")
    def test_a_rank_that_fails(self, accelerator: Accelerator, fault: str) -> None:
        """If a rank dies or stays away, the others get a CollectiveError within the timeout, not a hang."""
        require_devices(accelerator, 2)
        shared, room = accelerator.capabilities.shared_device, room_for_ranks(accelerator)
        sizes = [size for size in FAULTS[fault] if size <= room]
        with ThreadPoolExecutor(len(sizes) if shared else 1) as jobs:  # they mostly wait
            for outcomes in jobs.map(lambda size: fault_outcomes(accelerator, size, fault), sizes):
                _expect_errors_in_time(outcomes, fault, f"Collectives.{FAULTS[fault][len(outcomes)]}")


class TestCollectives(CollectivesContract):
    pass


def fault_outcomes(accelerator: Accelerator, size: int, fault: str) -> list[Outcome]:
    """Return how each of `size` ranks ends when the last one fails."""
    library = "a library" if "," in accelerator.collectives.spec else "gloo"
    timeout = FAULT_TIMEOUTS[library]
    fragile = Cluster(accelerator.name, size, timeout=timeout)
    try:
        limit = timeout + FAULT_GRACE + 15
        return fragile.outcomes(fault_body, fault=fault, name=FAULTS[fault][size], limit=limit)
    finally:
        fragile.stop()


def _expect_errors_in_time(outcomes: list[Outcome], fault: str, method: str) -> None:
    *others, last = outcomes
    for outcome in others:
        came = outcome.error or f"{outcome.value}"
        fine = outcome.status == "returned" and outcome.value <= FAULT_GRACE
        expected = (
            f"rank {outcome.rank} of {len(outcomes)} must raise CollectiveError at most {FAULT_GRACE:.0f} s "
            "after its timeout"
        )
        expect(fine, method, f"{expected} when rank {last.rank} {fault}", came)


def _each(shard: Tensor, group: Group) -> list[int]:
    """The counts of an all_to_all in which every rank gets as many elements as a shard has."""
    return [shard.numel()] * group.size


def all_gather_body(context: Context, dtype: torch.dtype) -> None:
    calls, device = _collectives(context), context.accelerator.device
    for n, offset, in_place, async_op in _places():
        whole, output = _framed(n * context.size, offset, dtype, device)
        mine = _pattern(n, context.rank, dtype)
        shard = output[context.rank * n :][:n] if in_place else _framed(n, 3 - offset, dtype, device)[1]
        shard.copy_(mine)
        calls.all_gather(output, shard, context.group, async_op).wait()
        want = torch.cat([_pattern(n, r, dtype) for r in range(context.size)])
        case = f"{n} elements, offset {offset}, {in_place=}, {async_op=}"
        _expect_framed(
            whole, offset, want, "Collectives.all_gather", f"every shard at its rank's place ({case})"
        )
        expect_close(shard, mine, "Collectives.all_gather", f"shard must stay ({case})")


def reduce_scatter_body(context: Context, dtype: torch.dtype) -> None:
    calls, device = _collectives(context), context.accelerator.device
    for n, offset, _, async_op in _places():
        for op, reduce in REDUCTIONS.items():
            whole, output = _framed(n, offset, dtype, device)
            full = _framed(n * context.size, 3 - offset, dtype, device)[1]
            rows = _rows(n * context.size, context.size, dtype)
            full.copy_(rows[context.rank])
            kept = full.clone()
            calls.reduce_scatter(output, full, context.group, op, async_op).wait()
            want = reduce(rows)[context.rank * n :][:n]
            case = f"{op}, {n} elements, offset {offset}, {async_op=}"
            _expect_framed(whole, offset, want, "Collectives.reduce_scatter", f"this rank's slice ({case})")
            expect_close(full, kept, "Collectives.reduce_scatter", f"the input must stay ({case})")


def all_to_all_body(context: Context, dtype: torch.dtype) -> None:
    calls, device, size, me = _collectives(context), context.accelerator.device, context.size, context.rank
    for n, offset, uneven, async_op in _places():
        counts = [[n * ((s + d) % 3 if uneven else 1) for d in range(size)] for s in range(size)]
        whole, output = _framed(sum(row[me] for row in counts), offset, dtype, device)
        parts = _framed(sum(counts[me]), 3 - offset, dtype, device)[1]
        parts.copy_(torch.cat([_pattern(counts[me][d], me + d, dtype) for d in range(size)]))
        kept = parts.clone()
        received = [row[me] for row in counts]
        calls.all_to_all(output, parts, received, counts[me], context.group, async_op).wait()
        case = f"{counts=}, offset {offset}, {async_op=}"
        want = torch.cat([_pattern(counts[s][me], s + me, dtype) for s in range(size)])
        _expect_framed(whole, offset, want, "Collectives.all_to_all", f"what each rank sends ({case})")
        expect_close(parts, kept, "Collectives.all_to_all", f"the input must stay ({case})")


def all_reduce_body(context: Context, dtype: torch.dtype) -> None:
    calls, device = _collectives(context), context.accelerator.device
    for n, offset, _, async_op in _places():
        for op, reduce in REDUCTIONS.items():
            whole, tensor = _framed(n, offset, dtype, device)
            rows = _rows(n, context.size, dtype)
            tensor.copy_(rows[context.rank])
            calls.all_reduce(tensor, context.group, op, async_op).wait()
            want = reduce(rows)
            case = f"{op}, {n} elements, offset {offset}, {async_op=}"
            _expect_framed(whole, offset, want, "Collectives.all_reduce", f"the same on every rank ({case})")


def broadcast_body(context: Context) -> None:
    calls, device = _collectives(context), context.accelerator.device
    capabilities = context.accelerator.capabilities
    dtypes = [*(d for d in FLOATS if declares(capabilities, dtype_name(d))), *INTEGERS]
    for source in range(context.size):
        for i, (n, offset, _, async_op) in enumerate(_places()):
            dtype = dtypes[(i + source) % len(dtypes)]
            whole, tensor = _framed(n, offset, dtype, device)
            tensor.copy_(_pattern(n, context.rank, dtype))
            calls.broadcast(tensor, source, context.group, async_op).wait()
            case = f"from rank {source}, {n} elements of {dtype}, offset {offset}, {async_op=}"
            want = _pattern(n, source, dtype)
            _expect_framed(whole, offset, want, "Collectives.broadcast", f"the source's values ({case})")


def host_body(context: Context) -> None:
    calls = _collectives(context)
    for dtype in (torch.float32, torch.int64):
        mine = torch.tensor([context.rank, 1], dtype=dtype)
        rows = torch.tensor([[r, 1, -1 - r] for r in range(context.size)], dtype=dtype)
        for op, reduce in REDUCTIONS.items():
            reduced = rows[context.rank].clone()
            calls.all_reduce(reduced, context.group, op)
            expect_close(reduced, reduce(rows), "Collectives.all_reduce", f"the {op} of host tensors")
        gathered = torch.zeros(2 * context.size, dtype=dtype)
        calls.all_gather(gathered, mine, context.group)
        want = torch.tensor([[r, 1] for r in range(context.size)]).flatten()
        expect_close(gathered, want, "Collectives.all_gather", "of host tensors")
        calls.broadcast(mine, context.size - 1, context.group)
        expect_close(mine[0], torch.tensor(context.size - 1), "Collectives.broadcast", "of host tensors")


def barrier_body(context: Context) -> None:
    calls, store = _collectives(context), context.group.store
    last = context.size - 1
    for round_ in range(2):
        if context.rank == last:
            time.sleep(0.1)
            store.set(f"arrived-{round_}", "yes")
        calls.barrier(context.group)
        arrived = store.check([f"arrived-{round_}"])
        expected = "must block every rank until the last one has arrived"
        expect(arrived, "Collectives.barrier", expected, "left early")
    calls.barrier(context.group)
    if context.rank == last:
        for round_ in range(2):
            store.delete_key(f"arrived-{round_}")
    calls.barrier(context.group)


def handles_body(context: Context, backwards: bool) -> None:
    calls, device, group = _collectives(context), context.accelerator.device, context.group
    n, size = 1001, context.size
    outputs = [torch.zeros(n * size, device=device) for _ in range(3)]
    shards = [torch.full((n,), float(10 * i + context.rank), device=device) for i in range(3)]
    total = torch.full((n,), 1.0, device=device)
    handles = [calls.all_gather(o, s, group, async_op=True) for o, s in zip(outputs, shards, strict=True)]
    handles.insert(1, calls.all_reduce(total, group, async_op=True))
    for handle in reversed(handles) if backwards else handles:
        handle.wait()
    handles[0].wait()
    for i, output in enumerate(outputs):
        want = torch.tensor([10.0 * i + r for r in range(size)]).repeat_interleave(n)
        expect_close(output, want, "Handle.wait", f"collective {i} must be complete after it")
    expected = "the all_reduce must be complete after it"
    expect_close(total, torch.full((n,), float(size)), "Handle.wait", expected)


def dropped_body(context: Context) -> None:
    calls, device = _collectives(context), context.accelerator.device
    n = 65_537
    for round_ in range(5):
        output = torch.zeros(n * context.size, device=device)
        shard = torch.full((n,), float(context.rank + round_), device=device)
        handle = calls.all_gather(output, shard, context.group, async_op=True)
        del shard
        thieves = [torch.full((n,), -1.0, device=device) for _ in range(4)]
        handle.wait()
        want = torch.tensor([float(r + round_) for r in range(context.size)]).repeat_interleave(n)
        expect_close(output, want, "Handle.wait", "the input must be kept alive until then")
        del thieves


def late_body(context: Context) -> dict[str, float]:
    """Return the seconds that each call took; the first rank makes all of them before the others do."""
    calls, group, device = _collectives(context), context.group, context.accelerator.device
    names = [name for name in CALLS if name != "all_to_all"]  # staged ones agree on their sizes first
    buffers = {n: (torch.ones(2 * group.size, device=device), torch.ones(2, device=device)) for n in names}
    for name, (full, shard) in buffers.items():
        CALLS[name](calls, full, shard, group).wait()  # whatever a first use costs
    streams = checked(context.accelerator).streams
    streams.synchronize()
    calls.barrier(group)
    if context.rank:
        time.sleep(LATE_SECONDS)
    seconds, handles = {}, []
    for name, (full, shard) in buffers.items():
        started = time.perf_counter()
        handles.append(CALLS[name](calls, full, shard, group))
        seconds[name] = time.perf_counter() - started
    for handle in handles:
        handle.wait()
    streams.synchronize()
    return seconds


def side_stream_body(context: Context, name: str, elsewhere: bool) -> None:
    accelerator, n, size = checked(context.accelerator), 1001, context.size
    streams, call = accelerator.streams, functools.partial(CALLS[name], accelerator.collectives)
    full, shard = (torch.zeros(length, device=accelerator.device) for length in (n * size, n))
    call(full, shard, context.group).wait()  # whatever a first use costs
    side = streams.new()
    waiting = streams.new() if elsewhere else side
    streams.synchronize()
    with streams.use(side):
        long_work(accelerator, BUSY_SECONDS)
        full.fill_(context.rank + 1)
        shard.fill_(context.rank + 1)
        handle = call(full, shard, context.group)
        if elsewhere:
            long_work(accelerator, BUSY_SECONDS)  # so that what is wrongly ordered behind this stream is late
    with streams.use(waiting):
        handle.wait()
        seen = (shard if name == "reduce_scatter" else full).clone()
        done = waiting.record()
    done.synchronize()
    streams.synchronize()
    expected = "must run after the work queued on the current stream, and before later work"
    if elsewhere:
        expected = f"must make the current stream wait for the {name}, which another stream started"
    method = "Handle.wait" if elsewhere else f"Collectives.{name}"
    expect_close(seen, _filled(name, n, size), method, expected)


def _filled(name: str, n: int, size: int) -> Tensor:
    """What a collective of `CALLS` gives if every rank's buffers hold the rank's number, counted from 1."""
    ranks = torch.arange(1.0, size + 1)
    if name in ("all_gather", "all_to_all"):
        return ranks.repeat_interleave(n)
    if name == "broadcast":
        return torch.full((n * size,), float(size))
    return torch.full((n if name == "reduce_scatter" else n * size,), float(ranks.sum()))


def gathers_body(context: Context) -> tuple[float, list[float]]:
    """What is declared, and the seconds of a few gathers that bring GATHERED_BYTES from another device."""
    accelerator = checked(context.accelerator)
    declared, device = accelerator.capabilities.link_bandwidth, accelerator.device
    if declared == 0 or accelerator.device_count() < context.size:
        return declared, []
    shard = torch.ones(GATHERED_BYTES, dtype=torch.uint8, device=device)
    full, seconds = torch.zeros(GATHERED_BYTES * context.size, dtype=torch.uint8, device=device), []
    for _ in range(GATHERS):  # the first has whatever a first use costs
        accelerator.streams.synchronize()
        accelerator.collectives.barrier(context.group)
        started = time.perf_counter()
        accelerator.collectives.all_gather(full, shard, context.group)
        accelerator.streams.synchronize()
        seconds.append(time.perf_counter() - started)
    return declared, seconds


def communication_body(context: Context, dtype: torch.dtype) -> None:
    calls, device, group = _collectives(context), context.accelerator.device, context.group
    method = "Collectives.empty"
    for n, offset, _, async_op in _places():
        for op, reduce in REDUCTIONS.items():
            numel = n * context.size + offset
            buffer = calls.empty(numel, dtype, device, group)
            found = buffer.shape, buffer.dtype, buffer.device.type, buffer.is_contiguous()
            want = (numel,), dtype, device.type, True
            expect(found == want, method, f"must give {want}: shape, dtype, device, contiguous", f"{found}")
            rows = _rows(n * context.size, context.size, dtype)
            output = torch.empty(n, dtype=dtype, device=device)
            full = buffer[offset:]
            full.copy_(rows[context.rank])
            calls.reduce_scatter(output, full, group, op, async_op).wait()
            case = f"{op}, {n} elements, offset {offset}, {async_op=}"
            mine = reduce(rows)[context.rank * n :][:n]
            expect_close(
                output, mine, method, f"a reduce_scatter from it must give this rank's slice ({case})"
            )
            expect_close(
                full, rows[context.rank], method, f"what is in it must stay until it is dropped ({case})"
            )


def given_out_body(context: Context) -> None:
    """One rank after another is fast: it drops each buffer before the others have waited for any of them."""
    calls, device, group = _collectives(context), context.accelerator.device, context.group
    streams, n = checked(context.accelerator).streams, 65_537
    for fast in range(context.size):
        calls.barrier(group)
        outputs = [torch.zeros(n, device=device) for _ in range(_GIVEN_OUT)]
        handles = []
        for i, output in enumerate(outputs):
            full = calls.empty(n * context.size, torch.float32, device, group).fill_(i + 1)
            handles.append(calls.reduce_scatter(output, full, group, async_op=True))
            if context.rank == fast:
                handles.pop().wait()
                streams.synchronize()
            del full
        if context.rank != fast:
            time.sleep(BUSY_SECONDS)
        for handle in handles:
            handle.wait()
        for i, output in enumerate(outputs):
            want = torch.full((n,), float((i + 1) * context.size))
            expected = "must not give out memory that other ranks have yet to read"
            expect_close(output, want, "Collectives.empty", f"{expected} (buffer {i + 1} of {_GIVEN_OUT})")


_GIVEN_OUT = 6


def groups_body(context: Context) -> None:
    calls, size = _collectives(context), context.size
    parts: list[list[int] | None] = [None, *([r] for r in range(size)), list(range(0, size, 2))]
    parts += [list(range(1, size))] if size > 1 else []
    for ranks in parts:
        group = calls.new_group(ranks, 10.0)
        members = list(range(size)) if ranks is None else ranks
        if context.rank not in members:
            expected = f"must be None on ranks outside {members}"
            expect(group is None, "Collectives.new_group", expected, repr(group))
            continue
        assert group is not None
        _check_group(context, calls, group, members)
    calls.barrier(context.group)


def member_groups_body(context: Context) -> bool:
    """Groups that their members alone make, side by side and overlapping, so that ranks are in different
    numbers of groups. Returns whether the backend says that it can do that.
    """
    calls, size = _collectives(context), context.size
    if not calls.member_groups:
        return False
    parts = [0], range(size // 2), range(size // 2, size), sorted({0, size - 1})
    for members in [list(ranks) for ranks in parts if context.rank in ranks]:
        group = calls.new_group(members, 10.0, members_only=True)
        assert group is not None
        _check_group(context, calls, group, members)
    calls.barrier(context.group)
    return True


def _check_group(context: Context, calls: Collectives, group: Group, members: list[int]) -> None:
    place = members.index(context.rank)
    right = (group.rank, group.size, group.timeout) == (place, len(members), 10.0)
    expect(right, "Collectives.new_group", f"must be place {place} of {len(members)}, timeout 10", str(group))
    device = context.accelerator.device
    for name, call in CALLS.items():
        full, shard = (torch.full((n,), place + 1.0, device=device) for n in (3 * group.size, 3))
        call(calls, full, shard, group).wait()
        seen = shard if name == "reduce_scatter" else full
        expected = f"must work in a group of some ranks, here {members}, with ranks numbered within the group"
        expect_close(seen, _filled(name, 3, group.size), f"Collectives.{name}", expected)
    calls.barrier(group)


def place_body(context: Context) -> tuple[int, int, float]:
    return context.group.rank, context.group.size, context.group.timeout


def misfit_body(context: Context) -> None:
    calls, device, size = _collectives(context), context.accelerator.device, context.size
    shard = torch.ones(4, device=device)
    for full in (torch.ones(4 * size + 1, device=device), torch.ones(4 * size, device=device).half()):
        for name, arguments in (("all_gather", (full, shard)), ("reduce_scatter", (shard, full))):
            call = functools.partial(getattr(calls, name), *arguments, context.group)
            expected = "buffers that do not fit the group must be refused"
            expect_raises(CollectiveError, f"Collectives.{name}", expected, call)
    buffer, even = torch.ones(4 * size, device=device), [4] * size
    misfits = [[5] * size, [4] * (size + 1), [-4, *even] if size > 1 else [-4]]
    if size > 1:  # what a rank sends to itself is not what it expects
        own = even.copy()
        own[context.rank], own[context.rank - 1] = 3, 5
        misfits.append(own)
    for counts in misfits:
        call = functools.partial(calls.all_to_all, buffer, buffer.clone(), even, counts, context.group)
        expected = "counts that do not fit the buffers or the group must be refused"
        expect_raises(CollectiveError, "Collectives.all_to_all", expected, call)
    released = torch.ones(4, device=device)
    refused = {"all_gather": [buffer, released], "all_reduce": [released]}
    if context.accelerator.capabilities.storage_resize:
        released.untyped_storage().resize_(0)
    for name, tensors in refused.items() if released.untyped_storage().nbytes() == 0 else ():
        call = functools.partial(getattr(calls, name), *tensors, context.group)
        expected = "a tensor whose storage was released must be refused"
        expect_raises(CollectiveError, f"Collectives.{name}", expected, call)
    calls.all_reduce(shard, context.group)
    expected = "must still work after refusing arguments that do not fit"
    expect_close(shard, torch.full((4,), float(size)), "Collectives.all_reduce", expected)


def fault_body(context: Context, fault: str, name: str) -> float:
    """The last rank fails; the others return how many seconds after the timeout they got their error."""
    calls, device = _collectives(context), context.accelerator.device
    full, shard = (torch.ones(n, device=device) for n in (1001 * context.size, 1001))
    CALLS[name](calls, full, shard, context.group).wait()
    calls.barrier(context.group)
    if context.rank == context.size - 1:
        _fail(context, fault)
    started, waits = time.monotonic(), []

    def call_and_meet() -> None:
        CALLS[name](calls, full, shard, context.group).wait()
        waits.append("only orders streams")
        calls.barrier(context.group)  # blocks the host even if `wait` does not

    expect_raises(CollectiveError, f"Collectives.{name}", f"a rank {fault}", call_and_meet)
    if waits:
        checked(context.accelerator).streams.synchronize()
        expected = f"a rank {fault}, wait is over and so is all work of the device"
        expect_raises(CollectiveError, "Collectives.check", expected, lambda: calls.check(context.group))
    seconds = time.monotonic() - started - context.group.timeout
    context.group.store.add("gave up", 1)
    return seconds


def _fail(context: Context, fault: str) -> None:
    if fault == "dies":
        os._exit(9)
    deadline = time.monotonic() + context.group.timeout + FAULT_GRACE
    while context.group.store.add("gave up", 0) < context.size - 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    os._exit(0)


REDUCTIONS: dict[ReduceOp, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(0),
    "max": lambda rows: rows.max(0).values,
    "min": lambda rows: rows.min(0).values,
}


def _collectives(context: Context) -> Collectives:
    return checked(context.accelerator).collectives


def _places() -> list[tuple[int, int, bool, bool]]:
    """(elements, offset, in place, async): every length at every offset, with the variants taking turns."""
    cases = [(n, offset) for n in LENGTHS for offset in OFFSETS]
    return [(n, offset, i % 2 == 0, i % 3 == 0) for i, (n, offset) in enumerate(cases)]


def _pattern(n: int, rank: int, dtype: torch.dtype, ranks: int = 1) -> Tensor:
    """(n,) whole numbers of either sign that look random; the sum over `ranks` is still exact."""
    top = _widest(dtype) // ranks
    return ((torch.arange(n) * _STRIDE + rank * _SHIFT) % (2 * top + 1) - top).to(dtype)


_STRIDE, _SHIFT = 2_654_435_761, 40_503_000_017


def _widest(dtype: torch.dtype) -> int:
    """The whole number up to which all are exact in `dtype`."""
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps)
    return 1 if dtype is torch.bool else 1 << (8 * dtype.itemsize - 3)


def _rows(n: int, ranks: int, dtype: torch.dtype) -> Tensor:
    """(ranks, n): each rank's input of a reduction."""
    return torch.stack([_pattern(n, rank, dtype, ranks) for rank in range(ranks)])


def _framed(n: int, offset: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A tensor filled with marks, and the n elements at `offset` in it."""
    whole = torch.full((offset + n + 5,), MARK, dtype=dtype, device=device)
    return whole, whole[offset : offset + n]


def _expect_framed(whole: Tensor, offset: int, want: Tensor, method: str, expected: str) -> None:
    framed = torch.full(whole.shape, MARK, dtype=whole.dtype)
    framed[offset : offset + want.numel()] = want
    expect_close(whole, framed, method, f"{expected}, and nothing around it written")


def _set_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
