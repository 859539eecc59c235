"""The engine without room: in every allocation of a step in turn, and wherever values are made whole."""

from __future__ import annotations

import gc
import itertools
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.sim.phases import LAYERS, PHASES, Run
from tests.zero.helpers.training import collect_all, collected


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
