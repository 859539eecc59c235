"""Units that stay gathered until the weights change: which ones, what that saves, and what it may not do."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.simulated import capacity
from tests.zero.helpers.compiled_models import VOCABULARY, WIDTH, fresh, tokens
from tests.zero.helpers.training import adamw
from zero.compiled.persistence import WARM_UP, WATCHED, PersistCandidate, choose

DECIDED = WARM_UP + WATCHED  # steps
FP32 = torch.float32
TABLE = VOCABULARY * WIDTH * FP32.itemsize


def candidate(name: str, nbytes: int, saved: float = 1, seconds: float = 1e-3) -> PersistCandidate:
    return PersistCandidate(name, (0, FP32), nbytes, saved, seconds)


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (0, []),
        (9, []),
        (10, ["slow"]),
        (30, ["slow", "often"]),
        (60, ["slow", "often"]),
        (130, ["slow", "often", "large"]),
    ],
)
def test_most_time_per_byte_is_chosen_first(room: int, expected: list[str]) -> None:
    """What does not fit makes place for what does; a gather that nothing repeats is never chosen."""
    all_ = [
        candidate("large", 100),
        candidate("often", 20, saved=3),
        candidate("slow", 10, seconds=5e-3),
        candidate("once", 1, saved=0),
    ]
    assert [c.unit for c in choose(all_, room)] == expected


def build(budget: int | str | None, accumulate: int = 1) -> zero.Engine:
    """budget: None for an eager engine."""
    model = fresh()
    settings = None if budget is None else zero.Compile(inner="aot_eager", persist_budget=budget)
    config = zero.Config(compile=settings, timeout=20, gradient_accumulation_steps=accumulate)
    return zero.initialize(model, adamw(model), config)


def train(engine: zero.Engine, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps * engine.config.gradient_accumulation_steps):
        loss = engine(tokens(step, engine.rank, engine.module))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def counted(engine: zero.Engine, first: int) -> int:
    """Bytes gathered in one more step."""
    engine.traffic.clear()
    train(engine, 1, first)
    return engine.traffic.bytes["all_gather"]


def traffic_body(context: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for accumulate in (1, 2):
        plain, all_ = build(0, accumulate), build("1GiB", accumulate)
        before = [train(engine, DECIDED) for engine in (plain, all_)]
        bytes_ = [counted(engine, 10) for engine in (plain, all_)]
        after = [train(engine, 2, 20) for engine in (plain, all_)]
        chosen = all_.explain().persistent
        found[f"{accumulate}"] = (
            before[0] == before[1] and after[0] == after[1],
            bytes_,
            sum(g.layout.numel * 4 for u in all_.units for g in u.groups),
            [(c.unit, c.saved) for c in chosen],
        )
    found["told"] = "until the weights change" in str(all_.explain())
    found["untold"] = plain.explain().room is None
    return found


def test_a_unit_is_gathered_once_until_the_weights_change(cluster: Clusters) -> None:
    """Same losses, and each unit travels once a step, however many micro-batches it has. The table stays
    gathered from forward to backward anyway: the first micro-batch saves nothing there."""
    ranks = cluster(2).run(traffic_body, limit=120)
    assert ranks[0]["1"][3] == ranks[1]["1"][3]
    for found in ranks:
        for accumulate in (1, 2):
            same, (plain, kept), model, chosen = found[str(accumulate)]
            assert same
            assert kept == model
            assert plain == accumulate * (2 * model - TABLE)
            assert {saved for name, saved in chosen if name.startswith("blocks")} == {2 * accumulate - 1}
        assert found["told"]
        assert found["untold"]


def stale_body(context: Context) -> dict[str, Any]:
    """Whatever changes the weights, the next forward sees the new ones."""
    plain, kept = build(None), build("1GiB")
    for engine in (plain, kept):
        train(engine, DECIDED)
        with torch.no_grad():  # everything persists now
            engine(tokens(0, context.rank, engine.module))
    found: dict[str, Any] = {"persists": sum(not unit.idle for unit in kept.units)}
    x = tokens(1, context.rank, kept.module)

    def same() -> bool:
        with torch.no_grad():
            return bool(plain(x) == kept(x))

    found["same"] = same()
    for engine in (plain, kept):
        weight = engine.module.blocks[0].mix.weight
        with zero.gathered(weight, write_rank=0):
            if context.rank == 0:
                with torch.no_grad():
                    weight.mul_(3)
    found["written"] = same()
    state = plain.state_dict()
    changed = {name: value * 0.5 for name, value in state.items()}
    for engine in (plain, kept):
        engine.load_state_dict(changed)
    found["loaded"] = same()
    with pytest.raises(zero.ShardedParameterError):
        _ = kept.module.blocks[0].mix.weight + 1
    kept.offload_states()
    found["parked"] = all(unit.idle for unit in kept.units)
    kept.reload_states()
    found["back"] = same()
    return found


def test_what_changes_the_weights_drops_what_persists(cluster: Clusters) -> None:
    for found in cluster(2).run(stale_body, limit=120):
        assert found.pop("persists") >= 4
        assert all(found.values()), found


def peak_of(engine: zero.Engine, number: int) -> int:
    """The device's highest point in forward and backward."""
    engine.accelerator.memory.reset_peak()
    engine.backward(engine(tokens(number, engine.rank, engine.module)))
    peak = engine.accelerator.memory.stats().peak
    engine.step()
    return peak


def room_body(context: Context, extra: int) -> dict[str, Any]:
    """A device with `extra` bytes beyond what the first steps need."""
    engine = build("auto")
    train(engine, WARM_UP)
    gc.collect()
    need = peak_of(engine, WARM_UP)
    with capacity(context.accelerator, int((need + extra) / 0.98) + 64):
        losses = train(engine, WATCHED - 1, WARM_UP + 1)
        peak = peak_of(engine, 10)
        losses += train(engine, 2, 20)
    explained = engine.explain()
    return {
        "room": explained.room,
        "taken": sum(c.nbytes for c in explained.persistent),
        "fits": peak <= need + extra,
        "chosen": [c.unit for c in explained.persistent],
        "losses": losses,
    }


@pytest.mark.usefixtures("exact", "simulated")
def test_what_the_device_has_free_is_used_and_no_more(cluster: Clusters) -> None:
    none, some = (cluster(2).run(room_body, extra=extra) for extra in (0, 60_000))
    assert none[0]["chosen"] == []
    assert some[0]["chosen"] == some[1]["chosen"] != []
    assert none[0]["losses"] == some[0]["losses"]
    for found in (*none, *some):
        assert found["taken"] <= found["room"] <= 61_000
        assert found["fits"]


def growth_body(context: Context) -> dict[str, Any]:
    """A device that grows too small for what persists, on one rank."""
    engine = build("auto")
    train(engine, DECIDED)
    before = len(engine.explain().persistent)
    peak = peak_of(engine, 10)
    with capacity(context.accelerator, peak + 1024) if context.rank == 0 else nullcontext():
        losses = train(engine, 2, 20)
    explained = engine.explain()
    return {
        "before": before,
        "after": len(explained.persistent),
        "room": sum(c.nbytes for c in explained.persistent) <= explained.room,
        "losses": losses,
    }


@pytest.mark.usefixtures("exact", "simulated")
def test_later_steps_that_need_more_get_it(cluster: Clusters) -> None:
    ranks = cluster(2).run(growth_body, limit=120)
    for found in ranks:
        assert 0 <= found["after"] < found["before"]
        assert found["after"] == ranks[0]["after"]
        assert found["room"]


def test_settings() -> None:
    assert zero.Compile(persist_budget="1MiB").persist_budget == 1 << 20
    assert zero.Compile(persist_budget="auto").persist_budget == "auto"
    for wrong in ("much", -1):
        with pytest.raises(zero.ConfigError, match="persist_budget"):
            zero.Compile(persist_budget=wrong)
