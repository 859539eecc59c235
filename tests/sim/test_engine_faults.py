"""The engine when faults occur: in every allocation of a step in turn, and in collectives of every phase."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Cluster, Clusters, Context
from tests.zero.helpers.training import collect_all, collected

LAYERS = 2
WIDTH = 8  # square layers are cut in the middle, so that all ranks allocate, and fail, alike
PHASES = ("init", "forward", "backward", "step")


@dataclass(frozen=True)
class Case:
    stage: int
    precision: str  # as in zero.Config, or "autocast": fp32 under torch.autocast
    clip: float | None
    optimizer: str

    @property
    def config(self) -> zero.Config:
        precision: Any = "fp32" if self.precision == "autocast" else self.precision
        return zero.Config(
            stage=self.stage, precision=precision, clip_norm=self.clip, units=(nn.Linear,), timeout=5
        )

    def run(self, context: Context) -> Run:
        return Run(context, self.config, self.optimizer, self.precision == "autocast")


# Every stage in every precision, and every pair of settings.
CASES = [
    Case(stage, precision, (None, 1e-3)[(stage + place) // 2 % 2], ("AdamW", "RMSprop")[(stage + place) % 2])
    for stage in (1, 2, 3)
    for place, precision in enumerate(("fp32", "bf16", "fp16", "autocast"))
]


class Run:
    """A model trained for one step, phase by phase."""

    def __init__(self, context: Context, config: zero.Config, optimizer: str, autocast: bool = False) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.config = config
        self.autocast = autocast
        self.model = nn.Sequential(*layers)
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=1e-2)
        self.x = torch.full((2, WIDTH), 0.1, device=context.accelerator.device)
        self.engine: zero.Engine
        self.loss: Tensor

    def init(self) -> None:
        self.engine = zero.initialize(self.model, self.optimizer, self.config)

    def forward(self) -> None:
        with torch.autocast(self.x.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            self.loss = self.engine(self.x).float().square().mean()

    def backward(self) -> None:
        self.engine.backward(self.loss)

    def step(self) -> None:
        assert self.engine.step()

    def until(self, phase: str) -> Run:
        for name in PHASES[: PHASES.index(phase)]:
            getattr(self, name)()
        return self

    def result(self) -> list[Tensor]:
        """Everything that a step changes."""
        state = self.engine.state_dict(master=True)
        scale = self.engine.loss_scale
        return [*state.values(), *([] if scale is None else [scale.cpu()])]


@dataclass
class Found:
    """What running out of memory did in one phase of one case.

    told: what there was no room for, by allocation; "" if it was for the model's own computation. repeated,
    refused: how often what failed could be repeated, or was refused. wrong: what should not have happened.
    """

    told: list[str] = field(default_factory=list)
    repeated: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)


def sweep_body(context: Context) -> dict[Case, dict[str, Found]]:
    found = {}
    with collected():
        for case in CASES:
            run = case.run(context).until("step")
            before = run.result()
            run.step()
            result = run.result()
            assert context.rank or not same(result, before), "a step that changes nothing shows nothing"
            del run
            collect_all()
            found[case] = {phase: sweep(context, case, phase, result) for phase in PHASES}
    return found


def sweep(context: Context, case: Case, phase: str, result: list[Tensor]) -> Found:
    """Let the first allocation of a phase fail, then the second, and so on until the phase makes no more.

    result: what the step gives without faults.
    """
    from accelz_sim import faults

    found = Found()
    for nth in itertools.count(1):
        before = context.accelerator.memory.stats().allocated
        run = case.run(context).until(phase)
        try:
            with faults.out_of_memory(nth):
                getattr(run, phase)()
            break
        except zero.OutOfMemoryError as error:
            found.told.append(
                re.sub(
                    r"^out of memory: |, [\d,]+ bytes needed, [\d,]+ of [\d,]+ free\. Try .*", "", str(error)
                )
            )
        except torch.OutOfMemoryError:
            found.told.append("")
        try:
            if phase == "init":
                check_lost(context, run, before)
            else:
                check_one_step(run, phase, result, found)
        except (AssertionError, zero.ZeroError) as error:
            found.wrong.append(f"allocation {nth}, {found.told[-1]!r}: {type(error).__name__}: {error}")
    return found


def check_lost(context: Context, run: Run, before: int) -> None:
    """Check that the model says that it is in pieces, and leaves no memory behind."""
    with pytest.raises(zero.ModelError, match="build them again"):
        run.init()
    with pytest.raises(zero.ShardedParameterError, match="build them again"):
        run.model[0].weight.sum()
    vars(run).clear()
    gc.collect()
    left = context.accelerator.memory.stats().allocated - before
    assert left == 0, f"{left} bytes left"


def check_one_step(run: Run, phase: str, result: list[Tensor], found: Found) -> None:
    """Check that what failed can either be repeated, giving exactly one step, or is refused from then on."""
    try:
        for name in [phase] if phase == "step" else PHASES[1:]:
            getattr(run, name)()
    except zero.UsageError as error:
        found.refused += 1
        if phase != "step" or "step() without backward()" not in str(error):
            raise
        run.forward()
        with pytest.raises(zero.UsageError, match="was interrupted"):
            run.backward()
        return
    found.repeated += 1
    assert same(run.result(), result), "not the weights of one step"


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def expected_words(case: Case, phase: str, size: int) -> set[str]:
    """What there may be no room for, besides what the model itself computes."""
    of_units = {
        "init": ["to shard", *(["for the optimizer state of"] if case.optimizer == "AdamW" else [])],
        "forward": ["to gather"] if case.stage == 3 and size > 1 else [],
        "backward": ["for gradients of", *(["to gather"] if case.stage == 3 and size > 1 else [])],
        "step": ["for the step of"] if case.optimizer == "AdamW" else [],
    }[phase]
    words = {f"no room {purpose} unit '{unit}'" for purpose in of_units for unit in range(LAYERS)}
    scaled = case.precision == "fp16" or case.clip is not None
    if phase == "init":
        words.add("no room for the factor of the gradients")
        words |= {"no room for the loss scale"} if case.precision == "fp16" else set()
    if phase == "step" and scaled:
        words.add("no room for the norm of the gradients")
    if phase == "step" and case.optimizer != "AdamW":
        words.add(f"no room for the step of {case.optimizer}")
        if scaled or size > 1 or case.precision == "bf16":
            words |= {f"no room for the fp32 gradients of unit '{unit}'" for unit in range(LAYERS)}
    return words


@pytest.mark.parametrize("size", [1, 2])
def test_any_allocation_may_fail(sim: Clusters, size: int) -> None:
    """The error says what there was no room for, and the step then happens exactly once or not at all."""
    for found in sim(size).run(sweep_body, limit=240):
        for case, phases in found.items():
            for phase, seen in phases.items():
                assert not seen.wrong, (case, phase, seen.wrong)
                assert set(seen.told) - {""} == expected_words(case, phase, size), (case, phase)
                assert "" not in seen.told or phase in ("forward", "backward"), (case, phase)
                if phase != "init":
                    assert seen.repeated + seen.refused == len(seen.told), (case, phase)
                    assert not seen.refused or phase == "step", (case, phase)


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


def relieved_body(context: Context) -> tuple[list[str], bool]:
    """Run out of memory when a unit is first gathered cast, with optimizer state on the device."""
    from accelz_sim import faults

    config = zero.Config(stage=3, units=(nn.Linear,), offload="auto", timeout=20)
    run = Run(context, config, "AdamW").until("forward")
    for _ in range(3):  # measured, and state placed on the device
        run.forward()
        run.backward()
        run.step()
    run.autocast = True
    with warnings.catch_warnings(record=True) as said, faults.out_of_memory(1):
        warnings.simplefilter("always")
        run.forward()
    run.backward()
    return [str(warning.message) for warning in said], run.engine.step()


def test_a_gather_under_autocast_that_finds_no_room_moves_state(sim: Clusters) -> None:
    for said, stepped in sim(2).run(relieved_body):
        assert any("of optimizer state was moved to the host" in message for message in said), said
        assert stepped


def gathered_body(context: Context) -> list[tuple[str, int]]:
    """`zero.gathered` when the n-th unit finds no room: the messages, and the number of units still held."""
    from accelz_sim import faults

    config = zero.Config(stage=3, precision="bf16", units=(nn.Linear,), timeout=20)
    run, found = Run(context, config, "AdamW").until("forward"), []
    for nth in range(1, len(run.engine.units) + 1):
        with pytest.raises(zero.OutOfMemoryError) as failed, faults.out_of_memory(nth):
            zero.gathered(run.engine.module).__enter__()
        found.append((str(failed.value), sum(unit.held for unit in run.engine.units)))
        run.forward()
        run.backward()
        run.step()
    return found


def test_gathered_without_room_lets_go_of_what_it_had(sim: Clusters) -> None:
    for found in sim(2).run(gathered_body):
        assert len(found) > 1
        for said, held in found:
            assert "no room to gather unit" in said
            assert not held


def whole_values_body(context: Context, optimizer: str) -> dict[str, list[str]]:
    """Every way to get whole values when the n-th allocation finds no room: the messages."""
    from accelz_sim import faults

    config = zero.Config(stage=3, precision="fp16", units=(nn.Linear,), timeout=20)
    run, found = Run(context, config, optimizer).until("step"), {}
    engine, name = run.engine, "0.weight"
    calls = {
        "state": lambda: engine.state_dict(master=True),
        "master": lambda: engine.full_master(name),
        "gradient": lambda: engine.full_gradient(name),
        "moments": lambda: engine.full_optimizer_state(name),
    }
    for what, call in calls.items():
        if what == "moments":
            run.step()
        told = found[what] = []
        for nth in itertools.count(1):
            try:
                with faults.out_of_memory(nth):
                    call()
                break
            except torch.OutOfMemoryError as error:
                told.append(f"{type(error).__module__}: {error}")
    return found


@pytest.mark.parametrize("optimizer", ["AdamW", "Adafactor"])
def test_whole_values_without_room_name_the_unit(sim: Clusters, optimizer: str) -> None:
    for found in sim(2).run(whole_values_body, optimizer=optimizer):
        for what, told in found.items():
            assert told, what
            for message in told:
                assert message.startswith(
                    "zero.tiers.room: out of memory: no room for whole values of unit"
                ), what


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
