"""Any collective may fail: the rank that failed first is named, and the engine goes on or says why not."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Cluster, Clusters, Context
from tests.sim.phases import Run

pytestmark = pytest.mark.slow  # starts programs

TIMEOUT = 2.5  # of collectives, in seconds; a busy machine takes one to form the groups
STAGES = {1: "fp16", 2: "bf16", 3: "fp32"}
KINDS = ("fails", "stalls")


# Where a fault occurs on rank 0: the phase, the number of its collective, from 1, and what that is.
STRIKES = {
    "connecting": ("init", 1, "join"),
    "the model": ("init", 2, "settings and model exchange"),
    "first values": ("init", 3, "broadcast of unit '0'"),
    "gather in forward": ("forward", 2, "all_gather of unit '1'"),
    "gather in backward": ("backward", 2, "all_gather of unit '1'"),  # the calls of units come first
    "reduce-scatter": ("backward", 1, "reduce_scatter of unit '1'"),
    "norm": ("step", 1, "all_reduce of unit 'gradient norm'"),
    "new weights": ("step", 2, "all_gather of unit '0'"),
}


ONLY_SHARDED = ("gather in forward", "gather in backward")
ONLY_RESIDENT = ("reduce-scatter", "new weights")


def strikes_at(stage: int) -> list[str]:
    left_out = ONLY_RESIDENT if stage == 3 else ONLY_SHARDED
    return [name for name in STRIKES if name not in left_out]


@dataclass(frozen=True)
class Struck:
    """How a rank met a fault. seconds: spent in the phase. next: how it went on, or the sum of weights."""

    error: str
    message: str
    seconds: float
    next: str | float


def struck_body(context: Context, stage: int) -> dict[tuple[str, str], Struck]:
    found = {}
    Run(context, zero.Config(timeout=30), "AdamW").until("forward")  # first imports take time
    for turn, (name, kind) in enumerate(itertools.product(strikes_at(stage), KINDS)):
        meet(context, turn)
        config = zero.Config(
            stage=stage,
            precision=STAGES[stage],  # type: ignore[arg-type]
            clip_norm=1.0,
            units=(nn.Linear,),
            timeout=TIMEOUT + turn / 1000,  # makes new groups: those of the previous turn failed
        )
        found[name, kind] = struck(context, config, name, kind)
    return found


def meet(context: Context, turn: int) -> None:
    """Let ranks start together, however long the previous fault has delayed the other one."""
    context.group.store.set(f"turn/{turn}/{context.rank}", "")
    context.group.store.wait([f"turn/{turn}/{r}" for r in range(context.size)], timedelta(seconds=60))


def struck(context: Context, config: zero.Config, name: str, kind: Any) -> Struck:
    from accelz_sim import faults

    phase, nth, _ = STRIKES[name]
    run = Run(context, config, "AdamW").until(phase)
    started = time.monotonic()
    try:
        with faults.collective(kind, nth) if context.rank == 0 else contextlib.nullcontext():
            getattr(run, phase)()
    except zero.CommunicationError as error:
        return Struck(type(error).__name__, str(error), time.monotonic() - started, go_on(run, phase))
    return Struck("nothing raised", "", 0.0, "")


def go_on(run: Run, phase: str) -> str | float:
    try:
        if phase == "init":
            return float(run.model[0].weight.sum())
        if phase != "step":
            run.forward()
            run.backward()
        run.step()
    except zero.ZeroError as error:
        return str(error)
    return "one step more"


@pytest.fixture(scope="module")
def strikes(sim: Clusters) -> dict[int, list[dict[tuple[str, str], Struck]]]:
    """What happened, by stage and rank. Ranks mostly wait for timeouts, so all jobs run at once."""
    jobs = {stage: Cluster("sim", 2, TIMEOUT) for stage in STAGES}

    def results(stage: int) -> list[dict[tuple[str, str], Struck]]:
        try:
            return jobs[stage].run(struck_body, limit=240, stage=stage)
        finally:
            jobs[stage].stop()

    with ThreadPoolExecutor() as threads:
        return dict(zip(STAGES, threads.map(results, STAGES), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("stage", "name"),
    [(stage, name) for stage in STAGES for name in strikes_at(stage) if name != "connecting"],
)
def test_any_collective_may_fail(
    strikes: dict[int, list[dict[tuple[str, str], Struck]]], stage: int, name: str, kind: str
) -> None:
    first, second = (found[name, kind] for found in strikes[stage])
    assert (first.error, second.error) == ("CommunicationError", "CommunicationError")
    assert max(first.seconds, second.seconds) < 4 * TIMEOUT
    assert STRIKES[name][2] in first.message
    assert "failed: an injected fault" in first.message
    if kind == "fails":
        assert "failed on this rank first, after " in first.message
        assert "It failed on rank 0 first" in second.message
        assert "an injected fault" in second.message
    else:
        waited = re.search(r"failed after ([\d.]+) s", first.message)
        assert waited is not None
        assert float(waited[1]) >= round(TIMEOUT, 1)
        assert "It failed on rank 0 first" in second.message or "All ranks had reached it" in second.message
    for found in (first, second):
        if name != "the model":  # models are compared before anything is changed
            assert re.search(
                "build them again|no collective is possible.*Start a new job|without backward",
                str(found.next),
            ), found


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_whose_ranks_do_not_connect_changes_nothing(
    strikes: dict[int, list[dict[tuple[str, str], Struck]]], kind: str
) -> None:
    first, second = (found["connecting", kind] for found in strikes[3])
    assert (first.error, second.error) == ("CommunicationError", "CommunicationError")
    assert max(first.seconds, second.seconds) < 4 * TIMEOUT
    told = "this rank could not join the job" if kind == "fails" else "not all ranks joined the job within"
    assert told in first.message
    assert "all_reduce failed: an injected fault" in first.message
    assert "not all ranks joined the job within" in second.message
    assert isinstance(first.next, float), "the model can be used"
    assert first.next == second.next


def aborted_body(context: Context, when: str, path: str) -> list[str]:
    """A collective is aborted on all ranks without the host noticing: the messages then, and of a save."""
    from accelz_sim import faults

    run = Run(context, zero.Config(stage=3, units=(nn.Linear,), timeout=20), "AdamW").until("forward")

    def save(async_: bool = False) -> None:
        run.engine.save_checkpoint(path, async_=async_)
        run.engine.wait_for_checkpoint()

    do = {
        "backward": run.backward,
        "save": save,
        "save in the background": lambda: save(async_=True),
        "state": run.engine.state_dict,
    }[when]
    with faults.collective("is aborted", 1):
        run.forward()
        with pytest.raises(zero.CommunicationError) as failed:
            do()
        with pytest.raises(zero.ZeroError) as again:
            save()
    return [str(failed.value), str(again.value)]


@pytest.mark.parametrize("when", ["backward", "save", "save in the background", "state"])
def test_nothing_is_saved_of_a_collective_that_was_aborted(tmp_path: Path, when: str) -> None:
    job = Cluster("sim", 2, timeout=20)
    try:
        for told in job.run(aborted_body, when=when, path=str(tmp_path / "run")):
            for message in told:
                assert "a collective was aborted" in message
                assert "start a new job from the last checkpoint" in message
    finally:
        job.stop()
    assert not (tmp_path / "run").exists()


class Either(nn.Module):
    """Two layers, in the order that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor, turned: bool) -> Tensor:
        first, second = (self.b, self.a) if turned else (self.a, self.b)
        return second(first(x)).square().mean()


def diverging_body(context: Context) -> str:
    from accelz_sim import faults

    model = Either()
    config = zero.Config(stage=3, units=(nn.Linear,), prefetch=0, timeout=20)
    engine = zero.initialize(model, torch.optim.AdamW(model.parameters()), config)
    x = torch.ones(2, 32, device=context.accelerator.device)
    refused = pytest.raises(zero.RankMismatchError)
    with faults.collective("is aborted", 1), torch.no_grad(), refused as failed:
        engine(x, context.rank == 1)
    return str(failed.value)


def test_an_abort_where_ranks_had_parted_says_where() -> None:
    """A library may abort mismatched collectives before the engine compares what the ranks have issued."""
    job = Cluster("sim", 2, timeout=20)
    try:
        for told in job.run(diverging_body):
            assert "ranks issued different collectives" in told
            assert "gather of unit 'a'" in told
            assert "gather of unit 'b'" in told
    finally:
        job.stop()
