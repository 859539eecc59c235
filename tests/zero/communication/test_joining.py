"""What a rank says that cannot join the job, and what becomes of the next attempt."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import zero
from accelz import CollectiveError
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import features
from tests.zero.helpers.training import adamw
from zero.communication.job import join

pytestmark = pytest.mark.host


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


def attempts_body(context: Context) -> list[str]:
    """A rank makes a mistake at which the others wait in vain; then all ranks do it right."""
    said = []
    for attempt in range(3):
        context.accelerator.collectives.barrier(context.group)
        model = nn.Linear(4, 4)
        config = zero.Config(timeout=3.0)
        wrong = nn.Identity() if attempt == 0 and context.rank == 1 else model
        try:
            engine = zero.initialize(wrong, adamw(model), config)
            engine.backward(engine(features(attempt, context.rank, model, width=4)).square().mean())
            said.append(f"stepped {engine.step()}")
        except zero.ZeroError as error:
            said.append(type(error).__name__)
    return said


def test_a_rank_that_does_not_join_spoils_one_attempt(cluster: Clusters) -> None:
    waited, mistaken = cluster(2).run(attempts_body)
    assert waited == ["CommunicationError", "stepped True", "stepped True"]
    assert mistaken == ["ModelError", "stepped True", "stepped True"]


def alone_body(context: Context) -> tuple[str, bool, bool]:
    """A rank asks for a whole value by itself; then all ranks ask for another one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=3.0))

    def step() -> bool:
        engine.backward(engine(features(0, context.rank, model, width=4)).square().mean())
        return engine.step()

    step()
    said = ""
    if context.rank == 0:
        with pytest.raises(zero.CommunicationError) as raised:
            engine.full_optimizer_state("0.weight")
        said = str(raised.value)
    context.accelerator.collectives.barrier(context.group)
    shape = engine.full_optimizer_state("1.bias")["exp_avg"].shape
    return said, shape == (4,), step()


def test_a_rank_that_asked_alone_is_not_taken_for_an_answer(cluster: Clusters) -> None:
    found = cluster(2).run(alone_body)
    assert "did not get the other ranks' state" in found[0][0]
    assert [rest for _, *rest in found] == [[True, True]] * 2


def ended_body(context: Context, path: str, call: str) -> str:
    """A rank's process ends, and the other one makes a call that waits in the store."""
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=15))
    engine.save_checkpoint(path)
    if context.rank:
        os._exit(0)
    began = time.monotonic()
    calls = {
        "load": lambda: engine.load_checkpoint(path),
        "read": lambda: engine.full_optimizer_state("weight"),
        "initialize": lambda: zero.initialize(other, adamw(other), zero.Config(timeout=15)),
    }
    with pytest.raises(zero.CommunicationError, match=r"rank 1 \(process \d+\) ended"):
        calls[call]()
    assert time.monotonic() - began < 10
    return "told"


@pytest.mark.parametrize("call", ["load", "read", "initialize"])
def test_a_rank_that_has_ended_is_not_waited_for(cluster: Clusters, tmp_path: Path, call: str) -> None:
    first, second = cluster(2).outcomes(ended_body, path=str(tmp_path / "one"), call=call)
    assert second.status == "died"
    assert first.value == "told", first.error
