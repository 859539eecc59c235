"""Several objects that open lanes on the groups of one job: each has lanes of its own."""

from __future__ import annotations

import functools
import os
import resource
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelz import CollectiveError, Collectives, Group
from accelz.conformance.cluster import Clusters, Context
from accelz.gloo import GlooLanes, lanes
from accelz_cpu import native
from accelz_cpu.common_memory import CommonMemory
from accelz_cpu.shared_memory import SharedMemoryCollectives

pytestmark = pytest.mark.slow  # starts programs


def through_memory() -> Collectives:
    library = native.library()
    assert library is not None
    return SharedMemoryCollectives(library, CommonMemory(torch.device("cpu")))


KINDS: dict[str, Callable[[], Collectives]] = {"lanes": GlooLanes, "memory": through_memory}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "memory" and native.library() is None:
        pytest.skip("the native library was not built here")
    return str(request.param)


def right(calls: Collectives, group: Group, add: float) -> bool:
    """Whether every collective gives what it should."""
    mine = torch.full((4,), group.rank + add)
    gathered, total, part = torch.zeros(4 * group.size), mine.clone(), torch.zeros(4)
    calls.all_gather(gathered, mine, group)
    calls.all_reduce(total, group)
    calls.reduce_scatter(part, gathered.clone(), group)
    expected = torch.arange(float(group.size)).repeat_interleave(4) + add
    scattered = group.size * (group.rank + add)
    return bool(
        torch.equal(gathered, expected) and (total == expected.sum() / 4).all() and (part == scattered).all()
    )


def in_turn_body(context: Context, kind: str) -> list[bool]:
    """One after another on one group, ranks having made some that they never use."""
    spare = [KINDS[kind]() for _ in range(context.rank)]
    found = [right(KINDS[kind](), context.group, float(turn)) for turn in range(3)]
    del spare
    return found


def at_once_body(context: Context, kind: str) -> list[bool]:
    """Taking turns, on two groups, and with collectives of one under way while another's begin."""
    several = [KINDS[kind]() for _ in range(3)]
    other = context.accelerator.collectives.new_group(None, 10.0)
    assert other is not None
    found = [
        right(calls, group, 10.0 * turn)
        for turn in range(2)
        for group in (context.group, other)
        for calls in several
    ]
    values = [torch.full((2,), float(number)) for number in range(len(several))]
    pairs = list(zip(several, values, strict=True))
    handles = [calls.all_reduce(value, other, async_op=True) for calls, value in pairs]
    for handle in handles:
        handle.wait()
    return [*found, *(bool((v == n * other.size).all()) for n, v in enumerate(values))]


@pytest.mark.parametrize("body", [in_turn_body, at_once_body])
def test_several_in_one_process(cluster: Clusters, kind: str, body: Callable[..., list[bool]]) -> None:
    for found in cluster(2).run(body, kind=kind, limit=30):
        assert all(found), found


def first_uses_body(context: Context, kind: str, same_group: bool) -> list[float]:
    """Two threads make first collectives: on groups of their own, or a movement and a reduction on one group.
    The ranks' threads come in opposite order.
    """
    calls = KINDS[kind]()
    groups = [context.accelerator.collectives.new_group(None, 10.0) for _ in range(2)]
    one, other = groups[0], groups[0 if same_group else 1]
    assert one is not None
    assert other is not None
    value, gathered = torch.ones(1000), torch.zeros(2000)
    jobs = [lambda: calls.all_reduce(value, one), lambda: calls.all_gather(gathered, torch.ones(1000), other)]
    if context.rank:
        jobs.reverse()
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
        time.sleep(0.3)  # long enough to be in its wait for the other rank
    for thread in threads:
        thread.join()
    return [value.sum().item(), gathered.sum().item()]


@pytest.mark.parametrize("same_group", [False, True])
def test_first_uses_by_two_threads(cluster: Clusters, kind: str, same_group: bool) -> None:
    found = cluster(2).run(first_uses_body, kind=kind, same_group=same_group, limit=30)
    assert found == [[2000.0, 2000.0]] * 2


def few_descriptors_body(context: Context) -> str:
    """More and more sizes, until there are no descriptors for them."""
    calls, before = GlooLanes(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, before[1]))
    try:
        for numel in range(1, 100):
            calls.all_reduce(torch.ones(numel), context.group)
    except CollectiveError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return "none"


def test_descriptors_that_run_out_are_an_error_and_not_the_end() -> None:
    disposable = Clusters("cpu", timeout=2.0)
    try:
        for message in disposable(2).run(few_descriptors_body, limit=20):
            assert "ulimit -n" in message
    finally:
        disposable.stop()


def differing_body(context: Context, what: str) -> str:
    """What one rank sends is not what the other expects."""
    calls, mine = GlooLanes(), [1000, 3000]
    if what.startswith("fewer"):
        mine.reverse()
    own = mine[context.rank]
    if what.endswith("exchanged"):
        sent, received = ([4, own], [4, 6]) if context.rank == 0 else ([6, 2], [own, 2])
        arguments = torch.zeros(sum(received)), torch.ones(sum(sent)), received, sent
        call = functools.partial(calls.all_to_all, *arguments, context.group)
    else:
        call = functools.partial(calls.broadcast, torch.ones(own), 0, context.group)
    with pytest.raises(CollectiveError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("what", ["more sent", "fewer sent", "more exchanged", "fewer exchanged"])
def test_ranks_that_disagree_get_an_error(what: str) -> None:
    """And no values of another size, and no end of the process."""
    disposable = Clusters("cpu", timeout=2.0)
    try:
        for message in disposable(2).run(differing_body, what=what, limit=20):
            if what.endswith("exchanged"):
                sent, expected = (4000, 12000) if what.startswith("more") else (12000, 4000)
                assert f"rank 1 expects {expected} bytes from rank 0, which sends {sent}" in message
    finally:
        disposable.stop()


def test_what_later_versions_of_torch_give_a_group_is_in_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.14 does, by keyword and without options; groups share the transport all the same."""
    given: list[Any] = []

    class Later:
        _Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            given.append(options)

    monkeypatch.setattr(dist, "ProcessGroupGloo", Later)
    monkeypatch.setattr(lanes, "_devices", lambda: ("the device",))
    lanes.share_transport()
    made: Any = Later
    made("store", 0, 1, timeout=timedelta(seconds=3), enable_reconfigure=True)
    (options,) = given
    assert (options.enable_reconfigure, options._timeout) == (True, timedelta(seconds=3))
    assert options._devices == ["the device"]
