"""Groups that span hosts: shared memory within each, gloo between them.

Ranks are told that they are on different hosts; that they really may be is for test_cpu_namespaces.py.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import zero
from accelz import CollectiveError, Slot
from accelz.conformance import test_collectives as contract
from accelz.conformance.cluster import Cluster, Context, Outcome
from accelz.gloo import GlooLanes
from accelz_cpu import hosts, native
from accelz_cpu.hierarchy import Hierarchy
from accelz_cpu.shared_memory import SharedMemoryCollectives
from tests.zero.helpers.models import LanguageModel, tokens
from tests.zero.helpers.training import same_bits, scaled_error, train_zero

pytestmark = pytest.mark.slow  # starts programs

TIMEOUT = 5.0
LATE = 10.0  # seconds by which a busy machine may be late, after a timeout
EVEN = ("AABB", "ABBA", "AABBCC")


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if native.library() is None:
        pytest.skip("the native library was not built here")


class SeveralHosts:
    """Ranks that believe what a layout says: "AAB" puts rank 2 on a host of its own."""

    def __init__(self, layout: str) -> None:
        self.cluster = Cluster("cpu", len(layout), TIMEOUT)
        self._layout = layout

    def run(self, body: Callable[..., Any], **arguments: Any) -> list[Any]:
        return self._ranks().run(body, **arguments)

    def outcomes(self, body: Callable[..., Any], **arguments: Any) -> list[Outcome]:
        return self._ranks().outcomes(body, **arguments)

    def _ranks(self) -> Cluster:
        self.cluster.run(pretend_body, layout=self._layout)  # after a failure they are new ones
        return self.cluster


def pretend_body(context: Context, layout: str) -> None:
    hosts.machine = lambda: [layout[context.rank]]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def several() -> Iterator[Callable[[str], SeveralHosts]]:
    made: dict[str, SeveralHosts] = {}

    def get(layout: str) -> SeveralHosts:
        if layout not in made:
            made[layout] = SeveralHosts(layout)
        return made[layout]

    yield get
    for ranks in made.values():
        ranks.cluster.stop()


@pytest.fixture
def disposable() -> Iterator[SeveralHosts]:
    """Two ranks on each of two hosts, of no use to later tests."""
    made = SeveralHosts("AABB")
    yield made
    made.cluster.stop()


def collectives(context: Context) -> SharedMemoryCollectives:
    calls = context.accelerator.collectives
    assert isinstance(calls, SharedMemoryCollectives)
    return calls


def contract_body(context: Context) -> None:
    assert isinstance(collectives(context).transport(context.group), Hierarchy)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        contract.all_gather_body(context, dtype)
        contract.reduce_scatter_body(context, dtype)
        contract.all_reduce_body(context, dtype)
    contract.broadcast_body(context)
    contract.host_body(context)
    contract.barrier_body(context)
    for backwards in (False, True):
        contract.handles_body(context, backwards)
    contract.dropped_body(context)
    contract.groups_body(context)
    contract.misfit_body(context)


@pytest.mark.parametrize("layout", EVEN)
def test_the_contract_holds(several: Callable[[str], SeveralHosts], layout: str) -> None:
    several(layout).run(contract_body)


def movements_body(context: Context) -> None:
    """Dtypes that gloo does not know, and those that the library cannot sum."""
    calls = collectives(context)
    gathered = torch.zeros(context.size, dtype=torch.bool)
    calls.all_gather(gathered, torch.tensor([context.rank % 3 == 0]), context.group)
    assert gathered.tolist() == [rank % 3 == 0 for rank in range(context.size)]
    value = torch.full((3,), complex(context.rank, 1))
    calls.broadcast(value, 1, context.group)
    assert torch.equal(value, torch.full((3,), complex(1, 1)))
    small = torch.ones(4, dtype=torch.int8)
    calls.all_reduce(small, context.group)
    assert torch.equal(small, torch.full((4,), context.size, dtype=torch.int8))


def test_other_dtypes(several: Callable[[str], SeveralHosts]) -> None:
    several("ABBA").run(movements_body)


def sums_body(context: Context, layout: str) -> list[bytes]:
    """What came is the sum on each host in rank order, rounded, and then over the hosts, rounded again."""
    calls, results = collectives(context), []
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(context.size, 5003, generator=generator) * 10.0 ** torch.arange(context.size)[:, None]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        parts = rows.to(dtype)
        by_host = [
            in_order([parts[r] for r, name in enumerate(layout) if name == h]) for h in sorted(set(layout))
        ]
        mine = parts[context.rank].clone()
        calls.all_reduce(mine, context.group)
        assert torch.equal(mine, in_order(by_host)), dtype
        results.append(mine.view(torch.uint8).numpy().tobytes())
    return results


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("layout", EVEN)
def test_sums_are_rounded_once_per_level(several: Callable[[str], SeveralHosts], layout: str) -> None:
    first, *others = several(layout).run(sums_body, layout=layout)
    assert all(other == first for other in others), "the same bits on all ranks"


def disorder_body(context: Context, seed: int) -> None:
    """Each rank has its own order of starting reductions among gathers, and of waiting."""
    calls, group, size = collectives(context), context.group, context.size
    order = random.Random(1000 * seed + context.rank)
    wholes = [torch.zeros(size * n) for n in (10, 700, 70_000)]
    totals = [torch.full((n,), float(context.rank)) for n in (7, 90_001)]
    shards = [torch.full((len(w) // size,), float(context.rank)) for w in wholes]
    gathers = iter(list(zip(wholes, shards, strict=True)))
    reductions = iter(list(totals))
    handles = []
    for is_gather in order.sample([True] * len(wholes) + [False] * len(totals), 5):
        if is_gather:
            whole, shard = next(gathers)
            handles.append(calls.all_gather(whole, shard, group, async_op=True))
        else:
            handles.append(calls.all_reduce(next(reductions), group, async_op=True))
    order.shuffle(handles)
    for handle in handles[:4]:
        handle.wait()
    del handles  # one is never waited for, and nobody is held up by that
    calls.barrier(group)


def test_any_order_of_waiting(several: Callable[[str], SeveralHosts]) -> None:
    for seed in range(10):
        several("AABB").run(disorder_body, seed=seed)


def killed_body(context: Context, victim: int) -> tuple[float, str]:
    """How long the others wait for a rank that died, and what they are told."""
    calls = collectives(context)
    whole, shard = torch.zeros(4000), torch.ones(1000)
    calls.all_gather(whole, shard, context.group)
    calls.barrier(context.group)
    if context.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        calls.all_gather(whole, shard, context.group)
    seconds = time.monotonic() - start
    with pytest.raises(CollectiveError, match="earlier failure"):
        calls.all_gather(whole, shard, context.group)
    return seconds, str(caught.value)


def test_a_rank_that_dies_on_another_host(disposable: SeveralHosts) -> None:
    outcomes = disposable.outcomes(killed_body, victim=3, limit=40)
    assert [o.status for o in outcomes] == ["returned", "returned", "returned", "died"]
    for outcome in outcomes[:3]:
        seconds, _ = outcome.value
        assert seconds < TIMEOUT + LATE
    assert "between the hosts failed" in outcomes[0].value[1]
    assert "(ranks 0 to 1 of this host are ranks 2, 3 of the group)" in outcomes[2].value[1]


def silent_body(context: Context) -> float:
    calls, store = collectives(context), context.group.store
    calls.barrier(context.group)
    start = time.monotonic()
    if context.rank == 3:
        store.wait([f"left/{rank}" for rank in range(3)], timedelta(seconds=TIMEOUT + 2 * LATE))
        return 0.0
    with pytest.raises(CollectiveError):
        calls.all_reduce(torch.zeros(1000), context.group)
    store.set(f"left/{context.rank}", "")
    return time.monotonic() - start


def test_a_rank_that_never_comes(disposable: SeveralHosts) -> None:
    assert max(disposable.run(silent_body)) < TIMEOUT + LATE


def differing_body(context: Context) -> str:
    calls = collectives(context)
    with pytest.raises(CollectiveError) as caught:
        calls.all_reduce(torch.zeros(80 if context.rank else 8), context.group)
    return str(caught.value)


def test_ranks_that_differ_get_an_error(disposable: SeveralHosts) -> None:
    told = disposable.run(differing_body)
    assert "reduce_scatter of 16 bytes" in told[0] + told[1]
    assert all(told)


def destroyed_body(context: Context) -> None:
    """A handle under way when the group goes, and a new job in the same processes."""
    calls = collectives(context)
    transport: Any = calls.transport(context.group)
    calls.barrier(context.group)
    calls.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        transport.nbytes()


def test_leaving(disposable: SeveralHosts) -> None:
    disposable.run(destroyed_body)


_CRASH = """
import threading
from accelz_cpu.hierarchy import _Sequence
_Sequence(None).append(lambda levels: threading.Event().wait(60))
raise ValueError("a user's error")
"""


def test_a_rank_that_raises_does_not_wait_for_a_collective_under_way() -> None:
    """Its launcher ends the job when its process has ended, and not before."""
    command = [sys.executable, "-c", _CRASH]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1
    assert "a user's error" in done.stderr


class Waiting:
    """What a hierarchy closes."""

    def __init__(self) -> None:
        self.closed = False

    def close(self, deadline: float) -> None:
        self.closed = True


def test_leaving_lingers_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelz_cpu.hierarchy.LINGER_SECONDS", 0.2)
    levels: Any = [Waiting(), Waiting()]
    left, begun, let_go = Hierarchy(*levels), threading.Event(), threading.Event()

    def until_let_go(_: Any) -> None:
        begun.set()
        let_go.wait(20)

    under_way = left._movements.append(until_let_go)
    assert begun.wait(20)
    behind = left._movements.append(lambda _: None)
    start = time.monotonic()
    left.close()
    assert time.monotonic() - start < 2.0
    assert all(level.closed for level in levels)
    let_go.set()
    assert under_way.wait()
    with pytest.raises(RuntimeError, match="destroyed before the collective began"):
        behind.wait()


def uneven_body(context: Context) -> tuple[bool, float, list[str]]:
    calls = collectives(context)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = torch.tensor([1.0])
        calls.all_reduce(value, context.group)
    said = [str(w.message) for w in caught if "use gloo" in str(w.message)]
    return calls.transport(context.group) is None, value.item(), said


def test_where_hosts_differ_gloo_serves(several: Callable[[str], SeveralHosts]) -> None:
    first, *others = several("AAB").run(uneven_body)
    assert first[:2] == (True, 3.0)
    assert len(first[2]) == 1
    assert "the hosts have 2, 1 ranks; start the same number on each" in first[2][0]
    assert others == [(True, 3.0, [])] * 2


def test_with_one_rank_on_each_host_gloo_serves(several: Callable[[str], SeveralHosts]) -> None:
    assert several("AB").run(uneven_body) == [(True, 2.0, [])] * 2


def refused_body(context: Context) -> tuple[bool, float, list[str]]:
    """One rank of the second host cannot have shared memory."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if context.rank == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    group = collectives(context).new_group(None, TIMEOUT)
    assert group is not None
    try:
        return uneven_body(Context(context.accelerator, group))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_where_one_host_cannot_share_memory_gloo_serves(several: Callable[[str], SeveralHosts]) -> None:
    first, *others = several("AABB").run(refused_body)
    assert first[:2] == (True, 4.0)
    assert "rank 3: cannot" in first[2][0]
    assert others == [(True, 4.0, [])] * 3


def common_body(context: Context, layout: str) -> None:
    """A host has the buffer once: its ranks see each other's writes, and other hosts' by gathering."""
    calls, group, n = collectives(context), context.group, 250
    strategy = context.accelerator.flat_buffers
    parameter = nn.Parameter(torch.arange(float(context.size * n)))
    slot = Slot(0, (context.size * n,), (1,), context.size * n)
    private = strategy.flatten([parameter], [slot], slot.numel, torch.float32)
    common = strategy.share(private, group)
    assert common is not None
    assert torch.equal(common.data, torch.arange(float(slot.numel))), "each host starts with all values"
    calls.barrier(group)
    for value in (100.0, 200.0):
        shard = common.data[context.rank * n :][:n]
        shard.fill_(value + context.rank)
        calls.barrier(group)
        for rank, name in enumerate(layout):
            seen = common.data[rank * n].item() == value + rank
            assert seen == (name == layout[context.rank])
        calls.barrier(group)
        calls.all_gather(common.data, shard, group)
        expected = torch.arange(context.size).repeat_interleave(n) + value
        assert torch.equal(common.data, expected)
        assert torch.equal(parameter.data, expected)
        calls.barrier(group)


@pytest.mark.parametrize("layout", EVEN)
def test_weights_once_per_host(several: Callable[[str], SeveralHosts], layout: str) -> None:
    several(layout).run(common_body, layout=layout)


def not_common_body(context: Context) -> bool:
    parameter = nn.Parameter(torch.zeros(12))
    strategy = context.accelerator.flat_buffers
    private = strategy.flatten([parameter], [Slot(0, (12,), (1,), 12)], 12, torch.float32)
    return strategy.share(private, context.group) is None


def test_weights_once_per_rank_where_gloo_serves(several: Callable[[str], SeveralHosts]) -> None:
    for layout in ("AAB", "AB"):
        assert all(several(layout).run(not_common_body))


def language_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(tokens(step, rank, model))["loss"]


def training_body(context: Context, precision: str) -> dict[str, Any]:
    """The same training twice over both levels, and once over gloo for the whole group."""
    native_collectives, runs = context.accelerator.collectives, []
    for calls in (native_collectives, native_collectives, GlooLanes()):
        context.accelerator.collectives = calls
        try:
            torch.manual_seed(3)
            config = zero.Config(precision=precision, clip_norm=0.5, timeout=20)  # type: ignore[arg-type]
            runs.append(train_zero(context, LanguageModel(), language_loss, config, gentle, steps=6))
        finally:
            context.accelerator.collectives = native_collectives
    first, again, gloo = runs
    return {"run to run": same_bits(first, again), "error": scaled_error(first.losses, gloo.losses)}


def gentle(model: nn.Module) -> torch.optim.Optimizer:
    """A learning rate at which a few steps do not amplify rounding."""
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


@pytest.mark.parametrize(("layout", "precision", "bound"), [("AABB", "fp32", 1e-5), ("ABBA", "bf16", 2e-2)])
def test_training_equals_that_over_gloo(
    several: Callable[[str], SeveralHosts], layout: str, precision: str, bound: float
) -> None:
    """At 16 bits each sum of gradients is rounded at other places: the bound is that of test_parity.py."""
    for found in several(layout).run(training_body, precision=precision):
        assert found["run to run"]
        assert found["error"] < bound
