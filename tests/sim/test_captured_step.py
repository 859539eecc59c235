"""A step's kernels as a graph: the same bits as calling them, whatever changes from step to step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.moments import values_of
from tests.zero.helpers.optimizers import lion, plain_sgd, sgd
from tests.zero.helpers.training import adamw
from zero.optimizer.captured_step import PATIENCE, STEADY, CapturedStep

STEPS = 8
FIRST = STEADY + 1
"""Steps that come before the first replay; the last of them is captured."""
OPTIMIZERS = {"adamw": adamw, "lion": lion, "sgd": sgd, "sgd without momentum": plain_sgd}


def _engine(capture: bool, optimizer: str = "adamw", **settings: Any) -> zero.Engine:
    model = fresh()
    config = zero.Config(timeout=20, capture_step=capture, **settings)
    return zero.initialize(model, OPTIMIZERS[optimizer](model), config)


def _captured(engine: zero.Engine) -> CapturedStep:
    found = engine._boundary.optimizer.captured
    assert found is not None
    return found


def _trained(
    capture: bool,
    steps: int = STEPS,
    spoiled: int | None = None,
    decay_at: int | None = None,
    steady: bool = False,
    **settings: Any,
) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, values, and the number of replays. spoiled: a step whose gradients overflow. decay_at: a step
    at which weight decay changes. steady: whether the learning rate does not change."""
    engine = _engine(capture, **settings)
    losses = []
    for step in range(steps):
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 if steady else 1 + step)
            group["weight_decay"] = 0.3 if step == decay_at else group["weight_decay"]
        for _ in range(settings.get("gradient_accumulation_steps", 1)):
            loss = language_loss(engine.module, step, 0)
            engine.backward(loss * 1e38 if step == spoiled else loss)
            engine.step()
        losses.append(loss.item())
    return losses, values_of(engine), _captured(engine).replays if capture else 0


def bits_body(context: Context, settings: dict[str, Any]) -> int:
    plain, captured = (_trained(capture, **settings) for capture in (False, True))
    assert captured[0] == plain[0]
    assert [name for name, value in plain[1].items() if not torch.equal(captured[1][name], value)] == []
    return captured[2]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("settings", "replays"),
    [
        pytest.param({}, STEPS - FIRST, id="stage 3"),
        pytest.param({"stage": 1, "precision": "bf16", "clip_norm": 0.1}, STEPS - FIRST, id="clipped"),
        pytest.param({"stage": 0, "precision": "bf16"}, STEPS - FIRST, id="stage 0"),
        pytest.param({"precision": "fp16", "spoiled": 5}, STEPS - FIRST, id="an overflow"),
        pytest.param({"moments": "bf16_stochastic"}, STEPS - FIRST, id="moments in bf16"),
        pytest.param({"optimizer": "lion", "moments": "8bit"}, STEPS - FIRST, id="moments in 8 bits"),
        pytest.param({"optimizer": "sgd"}, STEPS - FIRST, id="momentum"),
        pytest.param({"optimizer": "sgd without momentum"}, STEPS - FIRST, id="sgd"),
        pytest.param({"decay_at": 4}, STEPS - FIRST - FIRST, id="another weight decay"),
        pytest.param({"decay_at": 4, "steady": True}, STEPS - FIRST - FIRST, id="another at the same rate"),
    ],
)
def test_replays_have_the_bits_of_calls(
    sim: Clusters, ranks: int, settings: dict[str, Any], replays: int
) -> None:
    """With learning rates that change in each step."""
    assert sim(ranks).run(bits_body, settings=settings) == [replays] * ranks


@pytest.mark.parametrize("accumulate", ["local", "sharded"])
def test_sums_of_micro_batches_are_stepped_alike(sim: Clusters, accumulate: str) -> None:
    settings = {"gradient_accumulation_steps": 2, "accumulate": accumulate, "precision": "bf16"}
    (replays,) = sim(1).run(bits_body, settings=settings)
    assert replays == STEPS - FIRST
    sim(2).run(
        bits_body, settings=settings
    )  # sharded sums in fp32 of 16 bits are where the allocator puts them


def test_sums_over_ranks_stay_where_the_first_one_came(sim: Clusters) -> None:
    settings = {"gradient_accumulation_steps": 3, "accumulate": "sharded"}
    assert sim(2).run(bits_body, settings=settings) == [STEPS - FIRST] * 2


def away_body(context: Context) -> int:
    memory = context.accelerator.memory
    before = memory.stats().allocated
    engines = [_engine(capture, stage=context.size) for capture in (True, False)]
    for step in range(2 * FIRST + 3):
        if step == FIRST + 1:
            for engine in engines:
                engine.offload_states()
            assert memory.stats().allocated - before < 1000  # counts of steps
            for engine in engines:
                engine.reload_states()
        for engine in engines:
            engine.backward(language_loss(engine.module, step, 0))
            engine.step()
    captured, plain = map(values_of, engines)
    assert [name for name, value in plain.items() if not torch.equal(captured[name], value)] == []
    return _captured(engines[0]).replays


@pytest.mark.parametrize("ranks", [1, 2])
def test_neither_graph_nor_gradients_stay_on_the_device_when_the_state_leaves(
    sim: Clusters, ranks: int
) -> None:
    """Later steps are captured anew."""
    assert all(replays > 1 for replays in sim(ranks).run(away_body))


@pytest.mark.slow
def test_copies_of_the_model_are_stepped_alike(sim: Clusters) -> None:
    assert sim(4).run(bits_body, settings={"shard_ranks": 2, "precision": "bf16"}) == [STEPS - FIRST] * 4


def missing_body(context: Context) -> None:
    plain, captured = _engine(False), _engine(True)
    for step in range(2 * FIRST + 3):
        for engine in (plain, captured):
            loss = language_loss(engine.module, step, 0)
            only_a_part = step == FIRST + 1
            engine.backward(engine.module.gain * 2 if only_a_part else loss)
            engine.step()
        replays = _captured(captured).replays
        assert replays == (1 if step in (FIRST, FIRST + 1) else replays)
    assert replays > 1
    values = values_of(captured)
    assert [name for name, value in values_of(plain).items() if not torch.equal(values[name], value)] == []


def test_a_step_without_some_gradients_is_called(sim: Clusters) -> None:
    """It has other sub-groups than the graph; a later graph has other counts of steps."""
    sim(1).run(missing_body)


def refused_body(context: Context) -> None:
    streams = context.accelerator.streams

    def capture(run: Any) -> Any:
        run()
        raise RuntimeError("no room for a graph")

    streams.capture = capture  # type: ignore[method-assign]
    try:
        with pytest.warns(RuntimeWarning, match=r"could not be captured.*RuntimeError: no room for a graph"):
            _, _, replays = _trained(True)
    finally:
        del streams.capture
    assert replays == 0


def test_a_capture_that_fails_is_told_once(sim: Clusters) -> None:
    sim(1).run(refused_body)


def no_room_body(context: Context, nth: int) -> None:
    from accelz_sim import faults

    plain, captured = _engine(False), _engine(True)
    for step in range(FIRST + 2):
        for engine in (plain, captured):
            engine.backward(language_loss(engine.module, step, 0))
        plain.step()
        if step == FIRST - 1:
            with (
                faults.out_of_memory(nth),
                pytest.warns(RuntimeWarning, match="could not be captured.*OutOfMemoryError"),
            ):
                captured.step()
        else:
            captured.step()
    values = values_of(captured)
    assert [name for name, value in values_of(plain).items() if not torch.equal(values[name], value)] == []
    assert _captured(captured).replays == 0


@pytest.mark.parametrize("nth", [1, 2, 9])
def test_without_room_for_a_capture_kernels_are_called(sim: Clusters, nth: int) -> None:
    """Allocations of a capture: of rates, of what kernels take."""
    sim(1).run(no_room_body, nth=nth)


def never_body(context: Context) -> None:
    engine = _engine(True, "sgd")

    def train() -> None:
        for step in range(PATIENCE):
            engine.optimizer.param_groups[0]["momentum"] = 0.9 - step / 1000
            engine.backward(language_loss(engine.module, step, 0))
            engine.step()

    with pytest.warns(RuntimeWarning, match=r"no effect in 100 steps: gradients are at other addresses.*lr"):
        train()


def test_a_setting_that_changes_nothing_is_told(sim: Clusters) -> None:
    sim(1).run(never_body)


@pytest.mark.parametrize(
    "offload", [{"optimizer": "host"}, {"gradients": "host"}, {"params": "host"}, "auto"]
)
def test_offloaded_state_is_refused(offload: Any) -> None:
    with pytest.raises(zero.ConfigError, match="capture_step: steps are captured only where"):
        zero.Config(capture_step=True, offload=offload)
