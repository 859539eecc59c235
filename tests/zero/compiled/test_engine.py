"""The compiled engine: bytes, memory, errors, and other engines beside it."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import accelz
import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.compiled_models import FAULTS, WIDTH, Watched, Writing, fresh, tokens
from tests.zero.helpers.models import device_of
from tests.zero.helpers.training import adamw, collected, living

AOT = zero.Compile(inner="aot_eager")


def build(compile: zero.Compile | None = AOT, **settings: Any) -> zero.Engine:
    model = fresh()
    return zero.initialize(model, adamw(model), zero.Config(compile=compile, timeout=20, **settings))


def step(engine: zero.Engine, number: int, autocast: bool = False) -> float:
    device = device_of(engine.module).type
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        loss = engine(tokens(number, engine.rank, engine.module))
    engine.backward(loss)
    engine.step()
    return loss.item()


def traffic_body(context: Context) -> dict[str, Any]:
    """Bytes of the third step, with and without fusion, under autocast."""
    found: dict[str, Any] = {}
    for name, fuse in (("fused", True), ("plain", False)):
        engine = build(zero.Compile(inner="aot_eager", fuse_casts=fuse))
        found[f"{name} losses"] = [step(engine, n, autocast=True) for n in range(2)]
        engine.traffic.clear()
        step(engine, 2, autocast=True)
        found[name] = dict(engine.traffic.bytes)
        explained = engine.explain()
        found[f"{name} told"] = sum(g.nbytes for g in explained.graphs)
        found[f"{name} peaks"] = (max(g.peak for g in explained.graphs), explained.measured_peak)
    found["numel"] = {u.name: sum(g.layout.numel for g in u.groups) for u in engine.units}
    return found


def test_fused_casts_halve_what_is_only_used_cast(cluster: Clusters) -> None:
    """Blocks travel in bf16; the tied embedding is read in fp32 by the forward and cast by the backward;
    vectors are read in fp32. What the graphs hold is what is counted, less the table in the plain graphs: of
    one dtype, it stays gathered from forward to backward."""
    for found in cluster(2).run(traffic_body, limit=120):
        numel = found["numel"]
        blocks = sum(n for name, n in numel.items() if name.startswith("blocks"))
        table, vectors = numel["embedding.weight"], numel["<vectors>"]
        assert found["fused losses"] == found["plain losses"]
        assert found["fused"]["all_gather"] == 2 * 2 * blocks + (4 + 2) * table + 2 * 4 * vectors
        assert found["plain"]["all_gather"] == 2 * 4 * blocks + 4 * table + 2 * 4 * vectors
        assert found["fused told"] == found["fused"]["all_gather"]
        assert found["plain told"] == found["plain"]["all_gather"] + 4 * table
        assert found["fused"]["reduce_scatter"] == found["plain"]["reduce_scatter"]
        for name in ("fused", "plain"):
            predicted, measured = found[f"{name} peaks"]
            assert predicted == measured, name
        assert found["fused peaks"][1] < found["plain peaks"][1]


def memory_body(context: Context) -> dict[str, Any]:
    """Units are sharded between steps, and gathered one after another in a graph."""
    engine = build(zero.Compile(inner="aot_eager", prefetch_budget=0))
    states = []
    for number in range(2):
        loss = engine(tokens(number, context.rank, engine.module))
        engine.backward(loss)
        states += [unit.idle for unit in engine.units]
        engine.step()
    one_ahead = build(zero.Compile(inner="aot_eager", prefetch_budget="1MiB"))
    step(one_ahead, 0)
    largest = sum(sorted((g.nbytes for g in engine.explain().graphs[0].gathers), reverse=True)[:2])
    return {
        "idle": all(states),
        "on demand": engine.explain().measured_peak,
        "ahead": one_ahead.explain().measured_peak,
        "two largest": largest,
        "vectors": next(g.nbytes for g in engine.explain().graphs[0].gathers if g.unit == "<vectors>"),
    }


def test_bytes_go_right_after_the_last_use(cluster: Clusters) -> None:
    for found in cluster(2).run(memory_body):
        assert found["idle"]
        # The table is tied: read by the first and the last layer, it stays while the forward runs.
        assert found["on demand"] <= found["two largest"] + found["vectors"]
        assert found["ahead"] > found["on demand"]


def predicted_body(context: Context) -> list[tuple[str, int, int]]:
    """What forward and backward hold at their highest point, as predicted and as the device counts."""
    memory, found = context.accelerator.memory, []
    for autocast in (False, True):
        engine = build(zero.Compile(inner="aot_eager"))
        for number in range(2):
            x = tokens(number, context.rank, engine.module, length=64)
            gc.collect()
            memory.reset_peak()
            before = memory.stats().allocated - x.nbytes
            with torch.autocast(context.accelerator.device.type, torch.bfloat16, enabled=autocast):
                loss = engine(x)
            middle = memory.stats().peak - before
            memory.reset_peak()
            engine.backward(loss)
            after = memory.stats().peak - before
            engine.step()
        forward, backward = engine.explain().graphs
        found += [("forward", forward.live, middle), ("backward", backward.live, after)]
    return found


@pytest.mark.usefixtures("exact")
def test_the_predicted_peak_is_the_device_s(cluster: Clusters) -> None:
    for found in cluster(2).run(predicted_body, limit=120):
        for kind, predicted, measured in found:
            assert 0.9 < measured / predicted < 1.1, (kind, predicted, measured)


def exceptions_body(context: Context) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Watched()
    config = zero.Config(compile=AOT, timeout=20, gradient_accumulation_steps=1)
    engine = zero.initialize(model, adamw(model), config)
    x = torch.ones(2, WIDTH, device=device_of(model))

    def train() -> float:
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        return loss.item()

    train()
    before = engine(x).item()
    held = []
    for where in ("forward", "backward"):
        FAULTS.add(where)
        with pytest.raises(ArithmeticError):
            engine.backward(engine(x))
        FAULTS.clear()
        held += [unit.name for unit in engine.units if unit.held]
        after = engine(x).item()
    with pytest.raises(RuntimeError):
        engine(torch.ones(2, WIDTH + 1, device=x.device))
    with pytest.raises(zero.UsageError, match=r"engine\.backward"):
        engine(x).backward()
    return {"held": held, "same": before == after, "falls": train() > train(), "mode": engine.explain().mode}


def test_exceptions_leave_the_engine_usable(cluster: Clusters) -> None:
    for found in cluster(2).run(exceptions_body):
        assert found["held"] == []
        assert found["same"]
        assert found["falls"]
        assert found["mode"] == "graph"


def two_engines_body(context: Context) -> bool:
    """Beside each other they train as one does alone, eagerly."""
    alone = build(None)
    expected = [step(alone, number) for number in range(3)]
    first, second = build(), build()
    losses = [(step(first, number), step(second, number)) for number in range(3)]
    return losses == [(value, value) for value in expected]


def test_engines_beside_each_other(cluster: Clusters) -> None:
    assert all(cluster(2).run(two_engines_body))


@collected()
def leak_body(context: Context) -> tuple[int, int, bool]:
    """Tensors after 10 steps and after 100 more; then, whether the engine goes with all that it has."""
    engine = build()

    for number in range(10):
        step(engine, number)
    before = living(Tensor)
    for number in range(100):
        step(engine, number)
    after = living(Tensor)
    alive, values = weakref.ref(engine), weakref.ref(next(engine.module.parameters()))
    del engine
    gc.collect()
    return before, after, alive() is None and values() is None


def test_nothing_grows_over_100_steps_and_engines_are_freed(cluster: Clusters) -> None:
    """Threads of gloo have the last exchanges' tensors for a moment, before or after."""
    for before, after, freed in cluster(2).run(leak_body, limit=120):
        assert after < before + 50
        assert freed


def forget_collectives() -> None:
    """torch's flight recorder keeps the code that the last collectives were called from, graphs with it."""
    accelerator = accelz.current()
    values = [torch.zeros(1)]  # each library has its own
    if accelerator.device.type in accelerator.collectives.spec:
        values.append(torch.zeros(1, device=accelerator.device))
    for _ in range(int(os.environ.get("TORCH_FR_BUFFER_SIZE", "2000"))):
        for value in values:
            torch.distributed.all_reduce(value)


@collected()
def graphs_body(context: Context) -> list[int]:
    """Graphs that are there after each of some engines that nobody holds."""
    counts = []
    for _ in range(3):
        step(build(), 0)
        forget_collectives()
        counts.append(living(fx.GraphModule))
    return counts


@pytest.mark.host
def test_graphs_go_with_their_engine(cluster: Clusters) -> None:
    """Dynamo would keep them, and what they hold, for as long as the process runs."""
    for first, second, third in cluster(2).run(graphs_body):
        assert first == second == third


def writing_body(context: Context) -> str:
    model: nn.Module = Writing()
    engine = zero.initialize(model, adamw(model), zero.Config(compile=AOT, timeout=20))
    with pytest.raises(zero.ModelError) as caught:
        engine(torch.ones(2, WIDTH, device=device_of(model)))
    return str(caught.value)


@pytest.mark.host
def test_a_forward_that_writes_to_a_parameter_is_refused(cluster: Clusters) -> None:
    for message in cluster(2).run(writing_body):
        assert "layer.weight" in message
        assert "zero.gathered" in message


def disagreeing_body(context: Context) -> str:
    with pytest.raises(zero.RankMismatchError) as caught:
        build(zero.Compile(inner="aot_eager", prefetch_budget=1000 * context.rank))
    return str(caught.value)


@pytest.mark.host
def test_ranks_have_the_same_budgets(cluster: Clusters) -> None:
    """Other budgets would be other gathers."""
    for message in cluster(2).run(disagreeing_body):
        assert "Config(compile=...)" in message
        assert '"prefetch_budget":1000' in message


def hooks_body(context: Context) -> list[str]:
    """Hooks of the user's on parameters, which one graph passes by."""
    engine = build()
    parameter = engine.module.norm.weight
    said = []
    for register in (parameter.register_hook, parameter.register_post_accumulate_grad_hook):
        handle = register(lambda value: None)
        with pytest.raises(zero.UsageError) as caught:
            step(engine, 0)
        said.append(str(caught.value))
        handle.remove()
        step(engine, 0)
    return said


@pytest.mark.host
def test_hooks_on_parameters_are_refused(cluster: Clusters) -> None:
    for said in cluster(2).run(hooks_body):
        assert len(said) == 2
        assert all("gradients in a compiled graph never reach" in each for each in said)


def test_settings() -> None:
    assert zero.Config(compile=True).compile == zero.Compile()
    assert zero.Config(compile=False).compile is None
    assert zero.Compile(prefetch_budget="1MiB").prefetch_budget == 1 << 20
    with pytest.raises(zero.ConfigError, match="inner"):
        zero.Compile(inner="nvfuser")
    with pytest.raises(zero.ConfigError, match="prefetch_budget"):
        zero.Compile(prefetch_budget="much")


@pytest.mark.host
def test_explain_is_about_compiled_models(cluster: Clusters) -> None:
    assert all(cluster(1).run(explain_body))


def explain_body(context: Context) -> bool:
    with pytest.raises(zero.UsageError, match="compile=True"):
        build(None).explain()
    engine = build()
    step(engine, 0)
    return "forward" in str(engine.explain()) and "backward" in str(engine.explain())
