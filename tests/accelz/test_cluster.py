"""The worker ranks that distributed tests run on."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from accelz import CollectiveError, Collectives
from accelz.apart import Say, answers
from accelz.conformance.cluster import Cluster, ClusterError, Clusters, Context
from accelz.conformance.contract import ContractBroken, checked
from accelz_cpu.accelerator import build

from . import forked

pytestmark = pytest.mark.slow  # starts programs


def _place(context: Context) -> tuple[int, int, int]:
    return context.rank, context.size, os.getpid()


def _fail_on(context: Context, rank: int, how: str) -> int:
    if context.rank == rank:
        {"raise": _raise, "die": lambda: os._exit(3), "hang": lambda: time.sleep(60)}[how]()
    return context.rank


def _raise() -> None:
    raise ValueError("on purpose")


def _unpicklable(context: Context) -> object:
    return lambda: None


def _environment(context: Context, name: str) -> str | None:
    return os.environ.get(name)


def _sum_of_ranks(context: Context) -> float:
    value = torch.tensor([float(context.rank)], device=context.accelerator.device)
    context.accelerator.collectives.all_reduce(value, context.group)
    return value.item()


def test_values_come_back_by_rank_and_workers_are_reused(cluster: Clusters) -> None:
    first = cluster(2).run(_place)
    again = cluster(2).run(_place)
    assert [(r, s) for r, s, _ in first] == [(0, 2), (1, 2)]
    assert first == again, "the second run must be served by the same processes"


def _transport_threads(context: Context, groups: int) -> int:
    made = [torch.distributed.new_group(backend="gloo") for _ in range(groups)]
    for group in made:
        torch.distributed.all_reduce(torch.ones(1), group=group)
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads by their names in /proc")
def test_groups_that_pile_up_in_a_worker_share_a_transport_thread(cluster: Clusters) -> None:
    """torch's have one each, which wakes a hundred times a second."""
    assert cluster(2).run(_transport_threads, groups=5) == [1, 1]


@pytest.mark.parametrize(("how", "status"), [("raise", "raised"), ("die", "died"), ("hang", "hung")])
def test_a_failing_rank_is_reported_and_replaced(cluster: Clusters, how: str, status: str) -> None:
    outcomes = cluster(2).outcomes(_fail_on, rank=1, how=how, limit=3.0)
    assert [o.status for o in outcomes] == ["returned", status]
    assert cluster(2).run(_sum_of_ranks) == [1.0, 1.0]


def _slowly(context: Context) -> str:
    time.sleep(1.0)
    return "late"


def test_a_device_may_need_more_time(cluster: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster(2).outcomes(_slowly, limit=0.3)[0].status == "hung"
    monkeypatch.setenv("ACCELZ_PATIENCE", "20")
    assert cluster(2).run(_slowly, limit=0.3) == ["late", "late"]


def test_an_interrupted_run_leaves_no_answer_for_the_next(cluster: Clusters) -> None:
    """As where a test's own time limit ends it."""

    def interrupt(*_: object) -> None:
        raise TimeoutError("on purpose")

    cluster(2).start()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(TimeoutError):
            cluster(2).run(_slowly)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert cluster(2).run(_sum_of_ranks) == [1.0, 1.0]


def test_run_raises_with_rank_and_traceback(cluster: Clusters) -> None:
    with pytest.raises(ClusterError, match="rank 1 raised: ValueError: on purpose"):
        cluster(2).run(_fail_on, rank=1, how="raise")


def _wait_for_rank_1(context: Context) -> None:
    if context.rank == 1:
        raise ValueError("on purpose")
    time.sleep(60)


def test_ranks_that_wait_for_a_failed_one_are_not_waited_for(cluster: Clusters) -> None:
    started = time.monotonic()
    with pytest.raises(ClusterError, match=r"(?s)rank 0 hung.*rank 1 raised: ValueError"):
        cluster(2).run(_wait_for_rank_1)
    assert time.monotonic() - started < 15


def _call_and(context: Context, how: str) -> None:
    streams: Any = context.accelerator.streams
    streams.synchronize = {"hang": lambda: time.sleep(60), "die": lambda: os._exit(3)}[how]
    checked(context.accelerator).streams.synchronize()


@pytest.mark.parametrize(("how", "said"), [("hang", "hung: still in"), ("die", "died: .* in")])
def test_a_method_that_does_not_return_is_named(cluster: Clusters, how: str, said: str) -> None:
    with pytest.raises(ClusterError, match=f"ranks 0, 1 {said} Streams.synchronize") as error:
        cluster(2).run(_call_and, how=how, limit=2.0)
    assert error.value.method == "Streams.synchronize"


def _breaks(context: Context, ranks: tuple[int, ...]) -> None:
    if context.rank in ranks:
        came = f"{context.rank + 5} of 7"
        raise ContractBroken("Collectives.broadcast", "must carry the values (3 elements)", came)
    time.sleep(60)


def test_a_broken_contract_heads_the_message_and_ranks_that_differ_in_numbers_are_one(
    cluster: Clusters,
) -> None:
    with pytest.raises(ClusterError) as error:
        cluster(2).run(_breaks, ranks=(0, 1))
    said = "Collectives.broadcast: must carry the values (3 elements)\n  got:  {} of 7"
    assert str(error.value) == said.format(5)
    with pytest.raises(ClusterError) as error:
        cluster(2).run(_breaks, ranks=(1,))
    assert str(error.value).startswith(said.format(6) + "\n  on:   rank 1 of 2\nrank 0 hung: still running")


def test_a_start_that_returns_no_work_is_named() -> None:
    class Forgetful(Collectives):
        def _start_reduce_scatter(self, *args: Any) -> Any:
            super()._start_reduce_scatter(*args)

    accelerator = build()
    accelerator.collectives = Forgetful()
    calls = checked(accelerator).collectives
    group = calls.init(10.0)
    try:
        with pytest.raises(ContractBroken) as error:
            calls.reduce_scatter(torch.ones(3), torch.ones(3), group)
    finally:
        calls.destroy()
    said = "Collectives._start_reduce_scatter: must return a torch.distributed.Work\n  got:  None\n"
    assert str(error.value).startswith(said)


def _fork_joins(context: Context) -> Any:
    def join(say: Say) -> str:
        try:
            context.accelerator.collectives.init(10.0)
        except CollectiveError as error:
            return str(error)
        return "joined"

    context.accelerator.collectives.init(10.0)  # the rank itself may do so again
    return answers([join], 20.0, slow=lambda call, at: None)[0]


def test_a_forked_child_does_not_take_itself_for_the_rank(cluster: Clusters) -> None:
    (told,) = cluster(1).run(_fork_joins)
    assert "forked by one that has joined a job" in told


def test_a_value_that_does_not_pickle_is_an_error_not_a_hang(cluster: Clusters) -> None:
    with pytest.raises(ClusterError, match="does not pickle"):
        cluster(2).run(_unpicklable)


def test_workers_see_the_environment_of_their_start(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELZ_TEST_VARIABLE", "seen")
    alone = Cluster(device, 1)
    try:
        assert alone.run(_environment, name="ACCELZ_TEST_VARIABLE") == ["seen"]
    finally:
        alone.stop()


def test_an_unknown_device_is_named_when_the_ranks_start() -> None:
    with pytest.raises(ClusterError, match="nosuch"):
        Cluster("nosuch", 1).run(_place)


def test_collections_pass_over_what_the_server_has_imported(tmp_path: Path) -> None:
    done = forked.python(
        tmp_path,
        "import gc, sys; few = len(gc.get_objects()) < gc.get_freeze_count() / 10; "
        "print('torch' in sys.modules, gc.isenabled(), few)",
    )
    assert done.stdout == "True True True\n", done.stderr
