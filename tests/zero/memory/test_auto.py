"""Placement by measurement: as much on the device as fits, and never more."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.simulated import capacity, faults_of, is_simulated
from tests.zero.helpers.layers import BATCH, LAYERS, WIDTH, build, one_step
from zero.memory import balance
from zero.tiers import room


def moving(engine: zero.Engine) -> balance.AutoPlacementPolicy:
    """The policy of an engine with offload="auto"."""
    assert isinstance(engine._placement, balance.AutoPlacementPolicy)
    return engine._placement


class Stranger(torch.optim.SGD):
    """An optimizer that steps whole parameters, for all that is known of it; without temporaries."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr, momentum=0.9, foreach=False)


def beside_a_kernel(params: Any, lr: float) -> list[torch.optim.Optimizer]:
    """Every other layer whole, the one that is measured first among them."""
    every = list(params)
    return [Stranger([*every[0::4], *every[1::4]], lr), torch.optim.AdamW([*every[2::4], *every[3::4]], lr)]


def train(
    context: Context,
    steps: int = 4,
    batch: int = BATCH,
    optimizer_of: Any = torch.optim.AdamW,
    sizes: Sequence[int] = (1,) * LAYERS,
    **settings: Any,
) -> dict[str, Any]:
    gc.collect()
    model = build(sizes)
    optimizer = optimizer_of(model.parameters(), lr=1e-3)
    config = zero.Config(precision="bf16", timeout=20, **settings)
    engine = zero.initialize(model, optimizer, config)
    losses, peaks = [], []
    for step in range(steps):
        context.accelerator.memory.reset_peak()
        losses.append(one_step(engine, step, batch))
        peaks.append(context.accelerator.memory.stats().peak)
    predicted = engine._placement.predicted_peak
    tiers = [s.record.tier.name for u in engine.units for g in u.groups for s in g.subs]
    return {"losses": losses, "peaks": peaks, "predicted": predicted, "tiers": tiers}


def auto_body(context: Context, share: float, **settings: Any) -> dict[str, Any]:
    """Train where only `share` of what stage 3 needs is there."""
    plain = train(context, **settings)
    gc.collect()
    enough = int(max(plain["peaks"]) * share)
    with capacity(context.accelerator, enough):
        auto = train(context, **settings, offload="auto")
    return {"plain": plain, "auto": auto, "capacity": enough}


@pytest.mark.parametrize(
    ("size", "share", "clip_norm"), [(1, 0.6, 1.0), (1, 0.8, None), (2, 0.6, None), (2, 0.8, 1.0)]
)
@pytest.mark.usefixtures("exact", "simulated")
def test_auto_trains_in_less_memory(
    cluster: Clusters, size: int, share: float, clip_norm: float | None
) -> None:
    placements = set()
    for found in cluster(size).run(auto_body, share=share, clip_norm=clip_norm, limit=120):
        auto, plain = found["auto"], found["plain"]
        assert auto["losses"] == pytest.approx(plain["losses"], rel=1e-3)
        assert max(auto["peaks"]) <= found["capacity"]
        assert auto["peaks"][-1] == pytest.approx(auto["predicted"], rel=0.03)
        assert {"device", "host"} == set(auto["tiers"]), auto["tiers"]
        placements.add(tuple(auto["tiers"]))
    assert len(placements) == 1  # the same on every rank


@pytest.mark.parametrize(
    ("sizes", "share"),
    [((2, 1, 1, 1, 1, 1), 0.8), ((1, 2, 1, 2), 0.6), ((8, 1, 1, 2, 4), 0.6), ((8, 1, 1, 2, 4), 0.8)],
)
@pytest.mark.usefixtures("exact", "simulated")
def test_layers_of_unequal_sizes(cluster: Clusters, sizes: Sequence[int], share: float) -> None:
    """What is measured first may be smaller than what comes to the device later."""
    (found,) = cluster(1).run(auto_body, share=share, sizes=sizes, limit=60)
    auto = found["auto"]
    assert auto["losses"] == pytest.approx(found["plain"]["losses"], rel=1e-3)
    assert max(auto["peaks"]) <= found["capacity"]
    assert 0.9 < auto["peaks"][-1] / auto["predicted"] < 1.01


OWN = [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Rprop]


@pytest.mark.parametrize(
    ("share", "optimizer_of"), [*((0.95, each) for each in OWN), (0.8, torch.optim.NAdam)]
)
@pytest.mark.usefixtures("exact", "simulated")
def test_auto_learns_what_optimizers_take(cluster: Clusters, share: float, optimizer_of: Any) -> None:
    """Near the limit too, where torch would go over to temporaries of all parameters at once."""
    (found,) = cluster(1).run(auto_body, share=share, optimizer_of=optimizer_of, limit=60)
    auto = found["auto"]
    assert max(auto["peaks"]) <= found["capacity"]
    assert auto["peaks"][-1] == pytest.approx(auto["predicted"], rel=0.03)
    assert {"device", "host"} == set(auto["tiers"]), auto["tiers"]


ROOM = 1 << 26
"""Bytes that a device has whose free memory is taken whole: writing to gigabytes takes long."""


def small(context: Context) -> AbstractContextManager[None]:
    """In the block, a simulated device has little more memory than is in use."""
    simulated = is_simulated(context.accelerator.name)
    held = context.accelerator.memory.stats().allocated
    return capacity(context.accelerator, held + ROOM) if simulated else nullcontext()


def no_room_body(context: Context, optimizer_of: Any) -> dict[str, Any]:
    with small(context):
        return hungry_body(context, optimizer_of)


def hungry_body(context: Context, optimizer_of: Any) -> dict[str, Any]:
    """Someone takes what is left of the device, right before the update."""
    found: dict[str, Any] = {}
    for hungry in (False, True):
        engine = zero.initialize(
            model := build(),
            optimizer_of(model.parameters(), lr=1e-3),
            zero.Config(precision="bf16", offload="auto", timeout=20),
        )
        losses = [one_step(engine, step) for step in range(4)]
        near = len(moving(engine)._near)
        x = torch.ones(BATCH, WIDTH, device=engine.accelerator.device)
        engine.backward(engine(x).float().square().mean())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            taken = context.accelerator.memory.stats().free - 4096 if hungry else 0
            held = torch.empty(taken, dtype=torch.uint8, device=engine.accelerator.device)
            engine.step()
            del held
        told = sum("ran out of memory" in str(w.message) for w in caught)
        losses += [one_step(engine, step) for step in range(4, 7)]
        found["hungry" if hungry else "fed"] = (losses, engine.steps)
        found["told"], found["near"] = told, (near, len(moving(engine)._near))
    return found


@pytest.mark.parametrize("optimizer_of", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.usefixtures("exact")
def test_an_update_without_room_has_state_make_some(cluster: Clusters, optimizer_of: Any) -> None:
    (found,) = cluster(1).run(no_room_body, optimizer_of=optimizer_of, limit=60)
    (hungry, steps), (fed, expected) = found["hungry"], found["fed"]
    assert steps == expected == 8
    assert hungry == pytest.approx(fed, rel=1e-3)
    assert found["told"] == 1
    before, after = found["near"]
    assert before > after


@pytest.mark.parametrize("optimizer_of", [Stranger, beside_a_kernel])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.usefixtures("exact", "simulated")
def test_auto_knows_what_whole_parameters_take(cluster: Clusters, size: int, optimizer_of: Any) -> None:
    for found in cluster(size).run(auto_body, share=0.8, optimizer_of=optimizer_of, clip_norm=1.0, limit=120):
        auto, plain = found["auto"], found["plain"]
        assert auto["losses"] == pytest.approx(plain["losses"], rel=1e-3)
        assert max(auto["peaks"]) <= found["capacity"]
        assert 0.95 < auto["peaks"][-1] / auto["predicted"] < 1.01
        assert {"device", "host"} == set(auto["tiers"]), auto["tiers"]


def overflow_body(context: Context, overflows: int) -> dict[str, Any]:
    """The first steps are held back: an optimizer that steps itself has no state yet when they are over."""

    def run(offload: Any) -> tuple[list[int], int, list[str]]:
        gc.collect()
        optimizer = torch.optim.RMSprop((model := build()).parameters(), lr=1e-3, momentum=0.9, centered=True)
        config = zero.Config(precision="bf16", loss_scale="dynamic", offload=offload, timeout=20)
        engine = zero.initialize(model, optimizer, config)
        peaks = []
        for step in range(overflows + 4):
            context.accelerator.memory.reset_peak()
            one_step(engine, step, scale=float("inf") if step < overflows else 1.0)
            peaks.append(context.accelerator.memory.stats().peak)
        predicted = engine._placement.predicted_peak
        return peaks, predicted, [s.record.tier.name for u in engine.units for g in u.groups for s in g.subs]

    plain, _, _ = run(None)
    gc.collect()
    with capacity(context.accelerator, enough := int(max(plain) * 0.8)):
        peaks, predicted, tiers = run("auto")
    return {"peaks": peaks, "predicted": predicted, "capacity": enough, "tiers": tiers}


@pytest.mark.parametrize(("size", "overflows"), [(1, 1), (2, 3)])
@pytest.mark.usefixtures("exact", "simulated")
def test_steps_that_overflow_are_not_measured(cluster: Clusters, size: int, overflows: int) -> None:
    for found in cluster(size).run(overflow_body, overflows=overflows, limit=60):
        assert max(found["peaks"]) <= found["capacity"]
        assert found["peaks"][-1] == pytest.approx(found["predicted"], rel=0.03)
        assert {"device", "host"} == set(found["tiers"])


def growth_body(context: Context) -> dict[str, Any]:
    """A larger batch than was measured: state makes room for it, the forward is repeated."""
    peak = max(train(context)["peaks"])
    gc.collect()
    with capacity(context.accelerator, int(peak * 0.8)):
        engine = zero.initialize(
            model := build(),
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            zero.Config(precision="bf16", offload="auto", timeout=20),
        )
        for step in range(3):
            one_step(engine, step, BATCH)
        before = [s.record.tier.name for u in engine.units for g in u.groups for s in g.subs].count("device")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = one_step(engine, 3, 4 * BATCH)
        after = [s.record.tier.name for u in engine.units for g in u.groups for s in g.subs].count("device")
    told = [str(w.message) for w in caught if "ran out of memory" in str(w.message)]
    return {"before": before, "after": after, "told": told, "loss": loss}


@pytest.mark.usefixtures("exact", "simulated")
def test_out_of_memory_moves_state_away_and_goes_on(cluster: Clusters) -> None:
    (found,) = cluster(1).run(growth_body, limit=60)
    assert found["before"] > found["after"]
    assert len(found["told"]) == 1, found
    assert "moved to the host" in found["told"][0]


def crowded_body(context: Context, nth: int) -> dict[str, Any]:
    """The n-th allocation of a placement fails on the last rank. Per step: the loss, and how many records the
    policy knows to be on the device."""
    model = build()
    config = zero.Config(precision="bf16", offload="auto", timeout=20)
    engine = zero.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    policy = moving(engine)
    losses, near = [], []
    place = policy._place

    def crowded(records: Any) -> None:
        starved = len(losses) == 1 and context.rank == context.size - 1
        with faults_of(context.accelerator).out_of_memory(nth) if starved else nullcontext():
            place(records)

    policy._place = crowded  # type: ignore[method-assign]
    for step in range(5):
        losses.append(one_step(engine, step))
        there = [owned for owned in policy.optimizer.subs if owned.sub.record.tier.name == "device"]
        assert set(there) == set(policy._near)
        near.append(len(there))
    return {"losses": losses, "near": near}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.usefixtures("simulated")
def test_a_placement_without_room_leaves_the_rest_on_the_host(cluster: Clusters, size: int) -> None:
    usual = cluster(size).run(crowded_body, nth=10**6)
    found = cluster(size).run(crowded_body, nth=7)
    for before, after in zip(usual, found, strict=True):
        assert before["losses"] == after["losses"]
        assert before["near"][-1] == after["near"][-1]  # the next step has placed them again
    assert 0 < found[-1]["near"][1] < usual[-1]["near"][1]


class Hungry(nn.Module):
    """A layer that asks for more memory than there is, when it is told to."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.wants = False
        self._accelerator = context.accelerator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.wants:
            self.wants = False
            much = self._accelerator.memory.stats().free + 4096
            torch.empty(much, dtype=torch.uint8, device=x.device)
        return torch.tanh(self.linear(x))


def accumulating_body(context: Context, movable: bool) -> dict[str, Any]:
    """The second micro-batch of a step finds no room in its forward; state makes some, or there is none."""
    found: dict[str, Any] = {}
    optimizer_of = torch.optim.AdamW if movable else torch.optim.SGD
    for hungry in (False, True):
        model = build()
        model[3] = layer = Hungry(context)
        config = zero.Config(offload="auto", gradient_accumulation_steps=2, timeout=20)
        engine = zero.initialize(model, optimizer_of(model.parameters(), lr=1e-3), config)
        losses = [one_step(engine, step) for step in range(7)]
        layer.wants = hungry
        if hungry and not movable:
            with pytest.raises(torch.OutOfMemoryError):
                engine(torch.ones(BATCH, WIDTH, device=engine.accelerator.device))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses += [one_step(engine, step) for step in range(7, 10)]
        told = sum("ran out of memory" in str(w.message) for w in caught)
        found["hungry" if hungry else "fed"] = (losses, engine.steps)
        found["told"] = told
    return found


@pytest.mark.parametrize("movable", [True, False])
@pytest.mark.usefixtures("exact")
def test_a_forward_without_room_leaves_earlier_micro_batches(cluster: Clusters, movable: bool) -> None:
    (found,) = cluster(1).run(accumulating_body, movable=movable, limit=60)
    (hungry, steps), (fed, expected) = found["hungry"], found["fed"]
    assert steps == expected == 5
    assert hungry == pytest.approx(fed, rel=1e-5)
    assert found["told"] == movable


def evaluation_body(context: Context, precision: Any) -> tuple[list[int], list[float]]:
    """Records that leave in the middle of an evaluation."""
    model = build()
    config = zero.Config(precision=precision, offload="auto", timeout=20)
    engine = zero.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    losses = [one_step(engine, step) for step in range(4)]
    near = [len(moving(engine)._near)]
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine._boundary.stores.relieve(context.accelerator.memory.stats().capacity)
    near.append(len(moving(engine)._near))
    losses += [one_step(engine, step) for step in range(4, 6)]
    return near, losses


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_state_that_leaves_in_an_evaluation_is_trained(
    cluster: Clusters, device: str, precision: str
) -> None:
    if device == "cpu":
        pytest.skip("the host is the device: nothing moves")
    for (before, after), losses in cluster(2).run(evaluation_body, precision=precision, limit=60):
        assert before > after == 0
        assert losses[-1] < losses[0]


def away_body(context: Context, grows: bool) -> list[int]:
    with small(context):
        return taken_body(context, grows)


def taken_body(context: Context, grows: bool) -> list[int]:
    """Others use the device while the state is away. grows: the step before needed all of it as well."""
    engine = zero.initialize(
        model := build(),
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        zero.Config(precision="bf16", offload="auto", timeout=20),
    )
    near = []
    for step in range(7):
        if step == 4:
            if grows:
                _take(context, context.accelerator.memory.stats().free)
            engine.offload_states()
            _take(context, context.accelerator.memory.stats().free)
            engine.reload_states()
        one_step(engine, step)
        near.append(len(moving(engine)._near))
    return near


def _take(context: Context, nbytes: int) -> None:
    torch.empty(nbytes - 4096, dtype=torch.uint8, device=context.accelerator.device)


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.usefixtures("exact")
def test_what_others_take_while_the_state_is_away_is_not_of_a_step(cluster: Clusters, grows: bool) -> None:
    first, second = cluster(2).run(away_body, grows=grows, limit=60)
    assert first == second
    assert (first[3] > first[4]) == grows
    assert first[3] == LAYERS


def creep_body(context: Context, traced: bool) -> dict[str, Any]:
    """A step that comes too near to the limit, without reaching it. traced: the user follows its memory."""
    peak = max(train(context)["peaks"])
    gc.collect()
    with capacity(context.accelerator, int(peak * 1.2)), patch.object(room, "SAFETY_EXACT", 0.35):
        engine = zero.initialize(
            model := build(),
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            zero.Config(precision="bf16", offload="auto", timeout=20),
        )
        near = []
        for step, batch in enumerate((BATCH, BATCH, BATCH, BATCH + 32 * (context.rank == 0), BATCH)):
            if traced and step == 3:
                engine.trace_memory()
            one_step(engine, step, batch)
            near.append(len(moving(engine)._near))
        limit = room.usable(context.accelerator)
        predicted = engine._placement.predicted_peak
    return {"near": near, "predicted": predicted, "limit": limit}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.usefixtures("exact", "simulated")
def test_growth_moves_state_away_on_every_rank(cluster: Clusters, traced: bool) -> None:
    first, second = cluster(2).run(creep_body, traced=traced, limit=60)
    assert first["near"] == second["near"]
    probe, planned, same, fewer, after = first["near"]
    assert probe == 1
    assert planned == same > fewer == after
    assert first["predicted"] <= first["limit"]


def foreseen_body(context: Context, dtype: torch.dtype, **settings: Any) -> None:
    model = nn.Linear(WIDTH, WIDTH, dtype=dtype)
    engine = zero.initialize(model, torch.optim.AdamW(model.parameters()), zero.Config(**settings))
    for _ in range(settings["gradient_accumulation_steps"]):
        inputs = torch.ones(2, WIDTH, dtype=dtype, device=engine.accelerator.device)
        engine.backward(engine(inputs).square().mean())
    for gradients in engine._reducer.all:
        values = gradients.slice.get()
        assert gradients.slice_bytes == values.numel() * values.element_size()


@pytest.mark.parametrize("reduce_dtype", [None, "bf16"])
@pytest.mark.parametrize("accumulate", ["sharded", "local"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_slices_take_the_bytes_that_are_foreseen(
    cluster: Clusters, dtype: torch.dtype, micro_batches: int, accumulate: str, reduce_dtype: str | None
) -> None:
    settings = {"accumulate": accumulate, "reduce_dtype": reduce_dtype}
    cluster(2).run(foreseen_body, dtype=dtype, gradient_accumulation_steps=micro_batches, **settings)
