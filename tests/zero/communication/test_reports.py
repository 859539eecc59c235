"""What an error says about a failed collective, given what the ranks have reported."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
from torch.distributed import HashStore

from accelz import Group
from accelz.ranks.bounded_store import bounded
from zero.communication.reports import Failure, Report, Reports
from zero.communication.waits import Waits

TIMEOUT = 10.0
NAMES = {1: "all_gather of unit 'a'", 2: "all_gather of unit 'b'", 3: "all_reduce of unit 'norm'"}


def failure(number: int, seconds: float, cause: str = "it broke") -> Failure:
    return Failure(number, NAMES[number], seconds, cause)


def report(turn: int, come_to: int, failed: Failure | None) -> Report:
    return Report(turn, {n: text for n, text in NAMES.items() if n <= come_to}, failed)


def described(rank: int, size: int, reports: dict[int, Report], places: dict[int, str]) -> str:
    nothing: Any = None
    mine = reports[rank].failure
    assert mine is not None
    return Reports(Group(rank, size, TIMEOUT, nothing, nothing), "engine").describe(mine, reports, places)


AT_ONCE, LATE = 0.1, TIMEOUT + 0.1
MINE = "rank 0: collective 2, all_gather of unit 'b', failed"


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        pytest.param(
            {0: report(1, 2, failure(2, AT_ONCE))},
            f"{MINE} on this rank first, after 0.1 s: it broke. rank(s) 1, 2 did not answer (dead, or "
            "waiting for others until the timeout of 10 s)",
            id="at once, nobody else yet",
        ),
        pytest.param(
            {0: report(1, 2, failure(2, LATE)), 2: report(2, 3, failure(2, LATE))},
            f"{MINE} after 10.1 s: it broke. rank(s) 1 did not answer (dead, or busy outside the engine): "
            "look at the output of rank 1 first",
            id="waited for one that is silent",
        ),
        pytest.param(
            {r: report(3 - r, 2, failure(2, AT_ONCE if r == 1 else LATE, f"cause {r}")) for r in range(3)},
            f"{MINE} after 10.1 s: cause 0. It failed on rank 1 first: collective 2, all_gather of unit 'b', "
            "after 0.1 s: cause 1",
            id="another one's failed at once",
        ),
        pytest.param(
            {r: report(r + 1, 2, failure(2, LATE)) for r in range(3)},
            f"{MINE} after 10.1 s: it broke. All ranks had reached it: check the connections between them",
            id="all waited in it",
        ),
        pytest.param(
            {
                0: report(1, 2, failure(2, LATE)),
                1: report(2, 1, failure(1, LATE, "stuck")),
                2: report(3, 2, None),
            },
            f"{MINE} after 10.1 s: it broke. It failed on rank 1 first: collective 1, all_gather of unit "
            "'a', after 10.1 s: stuck. rank(s) 1 had not reached it",
            id="one was stuck before it",
        ),
    ],
)
def test_the_error_says_what_can_be_known(reports: dict[int, Report], expected: str) -> None:
    assert described(0, 3, reports, {}) == expected


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (
            {1: "save_checkpoint('c')"},
            "rank(s) 1 wait in save_checkpoint('c'): every rank must make the same calls. rank(s) 2 did not "
            "answer (dead, or busy outside the engine): look at the output of rank 2 first",
        ),
        (
            {1: "save_checkpoint('c')", 2: "save_checkpoint('c')"},
            "rank(s) 1, 2 wait in save_checkpoint('c'): every rank must make the same calls",
        ),
    ],
)
def test_a_silent_rank_is_where_it_has_published_that_it_waits(places: dict[int, str], expected: str) -> None:
    told = described(0, 3, {0: report(1, 2, failure(2, LATE))}, places)
    assert told == f"{MINE} after 10.1 s: it broke. {expected}"


@pytest.fixture
def nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the process's thread, at least, which would publish beside a test."""
    monkeypatch.setattr("zero.communication.waits.keep_looking", lambda _: None)


@pytest.mark.usefixtures("nobody_looks")
def test_a_rank_that_has_gone_on_waits_no_longer_where_it_did() -> None:
    """It publishes nothing at the end of a wait that raises, so that others learn of it."""
    store = bounded(HashStore(), 10.0)
    here, there = (Waits(Reports(Group(rank, 2, 60.0, store, None), "watch")) for rank in range(2))  # type: ignore[arg-type]
    with suppress(RuntimeError), there.waiting(5, "save_checkpoint('a')", limit=0.1):
        there.patience = 0.0
        there.look()
        raise RuntimeError
    assert here.places([1], 6) == {1: "save_checkpoint('a')"}
    assert here.places([1], 7) == {}, "it has issued collective 6 since"
    with there.waiting(6, "save_checkpoint('b')", limit=0.1):
        there.look()
        assert here.places([1], 7) == {1: "save_checkpoint('b')"}
    assert here.places([1], 7) == {}


@pytest.mark.usefixtures("nobody_looks")
def test_a_failure_is_logged_by_ranks_that_wait_for_others(caplog: pytest.LogCaptureFixture) -> None:
    """Once, with the first of the failures, long before the wait itself fails."""
    store = bounded(HashStore(), 10.0)
    groups = [Group(rank, 3, 60.0, store, None) for rank in range(3)]  # type: ignore[arg-type]
    waits = Waits(Reports(groups[0], "line"))
    for rank in (2, 1):
        mine = Failure(rank, NAMES[rank], 0.1, f"cause {rank}")
        Reports(groups[rank], "line").exchange(mine, among=())
    wait = waits.begin(7, "exchange of norms")
    wait.began -= waits.patience / 2
    waits.look()
    assert not wait.published
    wait.began -= waits.patience
    waits.look()
    assert wait.published  # for others to know where this rank is
    (told,) = {record.getMessage() for record in caplog.records}
    assert re.match(r"rank 0 has waited \d+ s in collective 7, exchange of norms: rank 2 has failed: ", told)
    assert "collective 2, all_gather of unit 'b', after 0.1 s: cause 2. It will fail after 60 s" in told


class Lost(HashStore):
    """A store whose host may go."""

    gone = False

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise RuntimeError("Connection reset by peer")
        return super().check(keys)


def test_what_was_read_before_is_told_when_the_store_is_gone() -> None:
    """Rank 0, which hosts it, gives up in its own wait and ends."""
    store = Lost()
    reached = bounded(store, 10.0)
    here, there = (Waits(Reports(Group(rank, 2, 60.0, reached, None), "watch")) for rank in (1, 0))  # type: ignore[arg-type]
    with there.waiting(5, "save_checkpoint('a')", limit=0.1):
        there.patience = 0.0
        there.look()
        here.places([0], 6)
        store.gone = True
        assert here.places([0], 6) == {0: "save_checkpoint('a')"}
        assert here.describe([0], 6) == "rank(s) 0 wait in save_checkpoint('a')"
