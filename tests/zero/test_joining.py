"""What a rank says that cannot join the job."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import zero
from accelz.errors import CollectiveError
from zero.communication.job import join


def accelerator(init: Callable[[float], Any]) -> Any:
    return SimpleNamespace(bind=lambda index: None, collectives=SimpleNamespace(init=init))


def failing_after(seconds: float) -> Any:
    def init(timeout: float) -> Any:
        time.sleep(seconds)
        raise CollectiveError("it broke")

    return accelerator(init)


def test_a_local_rank_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "one")
    with pytest.raises(zero.CommunicationError, match="LOCAL_RANK=one"):
        join(failing_after(0), 1.0)


def test_an_empty_local_rank_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "")
    bound: list[int] = []
    alone = failing_after(0)
    alone.bind = bound.append
    with pytest.raises(zero.CommunicationError):
        join(alone, 1.0)
    assert bound == [0]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0, "^this rank could not join the job: it broke"),
        (0.2, "^not all ranks joined .* exited early. Error on this rank: it broke"),
    ],
)
def test_other_ranks_are_suspected_only_after_a_long_wait(seconds: float, told: str) -> None:
    with pytest.raises(zero.CommunicationError, match=told):
        join(failing_after(seconds), 0.2)
