"""Optimizer state that graphs bring and send: the bits of state that stays, the peak of graphs without.

What it is compared with trains eagerly, which has the bits of graphs (test_training) and compiles nothing.
Its units are others, and so are the parts that ranks have: the parts of all ranks are compared together.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.simulated import faults_of, is_simulated
from tests.zero.helpers.compiled_models import FAULTS, WIDTH, Transformer, Watched, tokens
from tests.zero.helpers.models import device_of
from tests.zero.helpers.optimizers import lion
from tests.zero.helpers.training import adamw, collected
from zero.optimizer.piece_state import in_memory_order

pytestmark = pytest.mark.slow  # compiles

AOT = zero.Compile(inner="aot_eager")
VISITING: dict[str, Any] = {"optimizer": "host", "step": "device"}
LENGTH = 64  # long enough that activations leave room for all state
LONGER = 3 * LENGTH  # of all evaluation, for which one graph is enough
Parts = dict[str, list[tuple[int, Any]]]
"""One rank's values by name: where each part begins, and its elements."""
Script = Callable[[zero.Engine], None]


def build(offload: dict[str, Any], model: nn.Module | None = None, **settings: Any) -> zero.Engine:
    net = small() if model is None else model
    make = settings.pop("optimizer", adamw)
    settings = {"compile": AOT, "timeout": 20, **settings}
    return zero.initialize(net, make(net), zero.Config(offload=zero.Offload(**offload), **settings))


def eager(model: nn.Module | None = None, **settings: Any) -> zero.Engine:
    return build({}, model, compile=None, **settings)


def small() -> nn.Module:
    torch.manual_seed(7)
    return Transformer()


def micro_batch(engine: zero.Engine, number: int, length: int = LENGTH) -> Tensor:
    loss: Tensor = engine(tokens(number, engine.rank, engine.module, length))
    engine.backward(loss)
    return loss.detach()


def values(engine: zero.Engine) -> Parts:
    """Every master and every state, as a user sees them, without asking the engine to move anything."""
    found: Parts = {}
    for stepped in engine._boundary.optimizer.subs:
        for piece in stepped.pieces:
            parameter = piece.parameter
            seen = dict(engine.optimizer.state[parameter])
            if not parameter.is_meta:  # as of a split master
                seen["master"] = parameter
            for key, value in seen.items():
                spread = value if value.dim() else value.expand(parameter.shape)
                part = cast(Tensor, in_memory_order(spread.detach(), parameter))
                copied = part.to("cpu", torch.float32, copy=True).numpy()
                name = f"{key} of {stepped.name_of(piece)}, {value.dtype}"
                found.setdefault(name, []).append((piece.piece.start, copied))
    return found


def whole(ranks: list[Parts]) -> dict[str, Any]:
    """What the parts of all ranks are together, which are none twice and each behind the other."""
    found = {}
    for name in {name for parts in ranks for name in parts}:
        parts = sorted(part for rank in ranks for part in rank.get(name, []))
        ends = [start + len(values) for start, values in parts]
        assert [start for start, _ in parts] == [0, *ends[:-1]], name
        found[name] = np.concatenate([values for _, values in parts])
    return found


def same(found: list[dict[str, Any]], first: str, second: str) -> bool:
    """Whether two engines, by their names in what the ranks have found, have the same values."""
    one, other = (whole([each[name] for each in found]) for name in (first, second))
    return one.keys() == other.keys() and all(np.array_equal(v, other[k]) for k, v in one.items())


def there(engine: zero.Engine) -> int:
    """Bytes of the device that optimizer state takes, those of masters that are shards not among them."""
    return engine._tracer.held().optimizer


def steps(engine: zero.Engine, count: int = 3) -> Parts:
    """Train, and look at everything right behind each step."""
    found: Parts = {}
    number = 0
    for step in range(count):
        while not (stepped := engine.is_boundary):
            found[f"loss {number}"] = [(engine.rank, np.array([micro_batch(engine, number).item()]))]
            number += 1
        stepped = engine.step()
        assert stepped
        found |= {f"{step} {name}": value for name, value in values(engine).items()}
    return found


BF16 = {"precision": "bf16"}
TIERS_AND_SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp16, accumulation, params": (
        {"params": "host"}, {"precision": "fp16", "gradient_accumulation_steps": 2}
    ),
    "stage 2, clipped": ({}, {"stage": 2, **BF16, "clip_norm": 0.1}),
    "split masters": ({}, {**BF16, "masters": "split"}),
    "fp32, local": ({}, {"gradient_accumulation_steps": 2, "accumulate": "local"}),
    "half, activations": (
        {"fraction": 0.5, "gradients": "host", "activations": "host"}, {**BF16, "optimizer": lion}
    ),
}  # fmt: skip


ON_THE_HOST = "half, activations"
"""Enough where the device is the host, whatever the settings: nothing comes or goes."""


def parity_body(context: Context, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        tiers, settings = TIERS_AND_SETTINGS[name]
        visiting = build({**VISITING, **tiers}, **settings)
        found[name] = {"visiting": steps(visiting, 2), "plain": steps(eager(**settings), 2)}
        forward, backward = visiting.explain().graphs
        found[name]["brought"] = backward.counts.get("schedule_optimizer", 0)
        found[name]["ahead"] = forward.code.count("zero.offload_optimizer")
    return found


def size_on(device: str) -> int:
    """World size. Where the device is the host nothing comes or goes, on one rank as on several."""
    return 1 if device == "cpu" else 2


def test_bitwise_equal_to_state_on_the_device(cluster: Clusters, device: str) -> None:
    names = [ON_THE_HOST] if device == "cpu" else list(TIERS_AND_SETTINGS)
    ranks = cluster(size_on(device)).run(parity_body, names=names, limit=300)
    for name in names:
        found = [each[name] for each in ranks]
        assert same(found, "visiting", "plain"), name
        moved = {(each["brought"] > 0, each["ahead"]) for each in found}
        assert moved == {(True, 1) if device != "cpu" else (False, 0)}, name


def look(engine: zero.Engine) -> None:
    """Evaluation with longer batches, between backward and step, and behind a step."""

    def evaluate() -> None:
        with torch.no_grad():
            engine.eval()(tokens(50, engine.rank, engine.module, LONGER))
        engine.train()

    micro_batch(engine, 0)
    evaluate()
    engine.step()
    micro_batch(engine, 1)
    engine.step()
    evaluate()


def think_twice(engine: zero.Engine) -> None:
    """Forwards that no backward follows."""
    thrown = engine(tokens(51, engine.rank, engine.module, LENGTH))
    micro_batch(engine, 0)
    more = engine(tokens(52, engine.rank, engine.module, LENGTH))
    engine.step()
    del thrown, more


def two_in_one(engine: zero.Engine) -> None:
    """Two graphs, which share all parameters, under one backward."""
    parts = [engine(tokens(n, engine.rank, engine.module, LENGTH)) for n in (53, 54)]
    engine.backward(parts[0] + parts[1])
    engine.step()


def other_lengths(engine: zero.Engine) -> None:
    """Graphs with other room: what one has brought another has to send."""
    for number, length in enumerate((2 * LENGTH, 8, 2 * LENGTH, 8)):
        micro_batch(engine, number, length)
        engine.step()


def change(engine: zero.Engine) -> None:
    """New values between backward and step, and behind the step."""
    for behind in (False, True):
        micro_batch(engine, 0)
        if behind:
            engine.step()
        with zero.gathered(engine.module.norm.weight, write_rank=0), torch.no_grad():
            engine.module.norm.weight.mul_(1.25)
        with torch.no_grad():
            for state in engine.optimizer.state.values():
                state["exp_avg"].add_(0.25)
        if not behind:
            engine.step()


def change_what_was_copied(engine: zero.Engine) -> None:
    """The same where side streams run at once: the copy was made before the change."""
    simulated = is_simulated(engine.accelerator.name)
    with faults_of(engine.accelerator).prompt_streams() if simulated else nullcontext():
        change(engine)


def park(engine: zero.Engine) -> None:
    micro_batch(engine, 0)
    engine.step()
    engine.offload_states()
    engine.reload_states()


def give_up(engine: zero.Engine) -> None:
    """Gradients that are not stepped."""
    micro_batch(engine, 0)
    engine.zero_grad()
    micro_batch(engine, 1)
    engine.step()


def module_alone(engine: zero.Engine) -> None:
    """A part of the model, eagerly, around the step."""
    x = torch.ones(2, 4, WIDTH, device=device_of(engine.module))
    micro_batch(engine, 0)
    with torch.no_grad():
        engine.module.blocks[0](x)
    engine.step()
    with torch.no_grad():
        engine.module.blocks[0](x)


SCRIPTS: tuple[Script, ...] = (
    look, think_twice, two_in_one, change, change_what_was_copied, park, give_up, module_alone, other_lengths
)  # fmt: skip


def scripts_body(context: Context) -> dict[str, Any]:
    # Two graphs under one backward reduce their gradients one by one, an eager engine their sum.
    engines = {"visiting": build(VISITING), "plain": build({})}
    found: dict[str, Any] = {}
    for script in SCRIPTS:
        seen: dict[str, Any] = {}
        for kind, engine in engines.items():
            script(engine)
            seen[kind] = values(engine)
            seen[kind] |= {f"later {name}": value for name, value in steps(engine, 1).items()}
        visiting = engines["visiting"]
        with torch.no_grad():
            visiting(tokens(60, context.rank, visiting.module, LONGER))
        found[script.__name__] = {**seen, "left": there(visiting)}
    return found


def test_whatever_happens_in_between(cluster: Clusters, device: str) -> None:
    ranks = cluster(size_on(device)).run(scripts_body, limit=300)
    for script in SCRIPTS:
        found = [each[script.__name__] for each in ranks]
        assert same(found, "visiting", "plain"), script
        # Behind a forward nothing is there.
        assert device == "cpu" or [each["left"] for each in found] == [0] * len(found), script


def exceptions_body(context: Context) -> dict[str, Any]:
    torch.manual_seed(0)
    engines = [make(Watched()) for make in (partial(build, VISITING), eager) if torch.manual_seed(0)]
    x = torch.ones(1 << 10, WIDTH, device=device_of(engines[0].module))

    def train(engine: zero.Engine) -> None:
        engine.backward(engine(x))
        engine.step()

    held = []
    for engine in engines:
        train(engine)
        for where in ("forward", "backward"):
            FAULTS.add(where)
            with pytest.raises(ArithmeticError):
                engine.backward(engine(x))
            FAULTS.clear()
            held.append(there(engine))
            train(engine)
    brought = engines[0].explain().graphs[1].counts.get("schedule_optimizer", 0)
    visiting, plain = map(values, engines)
    return {"visiting": visiting, "plain": plain, "held": held[:2], "brought": brought}


def test_exceptions_leave_nothing_there(cluster: Clusters, device: str) -> None:
    ranks = cluster(2).run(exceptions_body, limit=120)
    assert same(ranks, "visiting", "plain")
    for found in ranks:
        if device != "cpu":
            assert found["held"] == [0, 0]
            assert found["brought"] > 0


def checkpoint_body(context: Context, path: str) -> dict[str, Any]:
    """Saved while records have stayed behind their step, in the background too; then, whether the engine goes
    with all that it has."""
    found: dict[str, Any] = {}
    plain, engine, loaded = eager(), build(VISITING), build(VISITING)
    steps(plain, 2)
    for later in (False, True):
        saved = Path(path, f"{later}")
        steps(engine, 2)
        engine.save_checkpoint(saved, async_=later)
        micro_batch(engine, 9)
        engine.step()
        engine.wait_for_checkpoint()
        steps(loaded, 1)
        loaded.load_checkpoint(saved)
        found[f"{later}"] = {"loaded": steps(loaded, 2), "plain": steps(plain, 2)}
        engine.load_checkpoint(saved)
    alive, value = weakref.ref(engine), weakref.ref(next(iter(engine.optimizer.state)))
    del engine
    gc.collect()
    return found | {"freed": alive() is None and value() is None}


def test_checkpoints(cluster: Clusters, tmp_path: Path) -> None:
    ranks = cluster(2).run(checkpoint_body, path=str(tmp_path), limit=120)
    for later in ("False", "True"):
        assert same([each[later] for each in ranks], "loaded", "plain"), later
    assert [each["freed"] for each in ranks] == [True, True]


def peak(engine: zero.Engine, length: int) -> dict[str, Any]:
    """The highest points of the third step, over what is there behind a forward; and where state was."""
    memory, device = engine.accelerator.memory, engine.accelerator.device
    x = tokens(2, engine.rank, engine.module, length).to(device)
    for _ in range(2):
        engine.backward(engine(x))
        engine.step()
    stayed = there(engine)
    loss = engine(x)
    sent = there(engine)
    del loss
    gc.collect()
    rest = memory.stats().allocated - x.nbytes
    engine.backward(engine(x))
    engine.step()
    memory.reset_peak()
    loss = engine(x)
    engine.backward(loss)
    del loss
    brought, graphs = there(engine), memory.stats().peak
    engine.step()
    whole = memory.stats().peak
    return {"graphs": graphs - rest, "whole": whole - rest, "state": (stayed, sent, brought), "rest": rest}


@collected()
def peaks_body(context: Context, length: int) -> dict[str, Any]:
    memory, found = context.accelerator.memory, {}
    tiers: dict[str, dict[str, Any]] = {
        "stays": {},
        "visits": VISITING,
        "by the host": {"optimizer": "host", "gradients": "device"},
    }
    for name, offload in tiers.items():
        gc.collect()
        before = memory.stats().allocated
        engine = build(offload, precision="bf16")
        found[name] = peak(engine, length)
        found[name]["rest"] -= before
        found[name]["predicted"] = max(graph.live for graph in engine.explain().graphs)
        sizes = [12 * g.layout.shard_numel for u in engine.units for g in u.groups if g.trainable]
        del engine
    return {**found, "records": sum(sizes), "largest": max(sizes)}


@pytest.mark.parametrize("length", [8, 64])
@pytest.mark.usefixtures("exact")
def test_the_peak_is_that_of_the_graphs(cluster: Clusters, length: int) -> None:
    """Long batches leave room for all state; with short ones all of it comes in the step, three at a time."""
    for found in cluster(2).run(peaks_body, length=length, limit=200):
        stays, visits, by_host = found["stays"], found["visits"], found["by the host"]
        assert visits["graphs"] == by_host["graphs"] == stays["graphs"]
        assert 0.95 < visits["graphs"] / visits["predicted"] < 1.05
        assert stays["rest"] - visits["rest"] == found["records"]
        if length == 64:
            assert visits["state"] == (found["records"], 0, found["records"])
            assert visits["whole"] == visits["graphs"]
        else:
            assert visits["state"] == (0, 0, 0)
            assert visits["graphs"] < visits["whole"] <= stays["whole"] + 3 * found["largest"]


@collected()
def script_peaks_body(context: Context) -> dict[str, list[int]]:
    """The highest point of each script, over what is there behind a forward; the host's state never comes."""
    memory, found = context.accelerator.memory, {}
    for offload in (VISITING, {"optimizer": "host", "gradients": "device"}):
        engine = build(offload, precision="bf16")
        for script in (look, think_twice, two_in_one, give_up, other_lengths):
            steps(engine, 1)
            with torch.no_grad():
                engine(tokens(60, engine.rank, engine.module, LONGER))
            gc.collect()
            rest = memory.stats().allocated
            memory.reset_peak()
            script(engine)
            found.setdefault(script.__name__, []).append(memory.stats().peak - rest)
        del engine
    return found


@pytest.mark.usefixtures("exact")
def test_no_script_takes_more(cluster: Clusters) -> None:
    """Two graphs under one backward, other forwards before the step and behind it, other lengths."""
    for found in cluster(2).run(script_peaks_body, limit=200):
        for name, (visiting, by_host) in found.items():
            assert visiting == by_host, name


def faults_body(context: Context) -> dict[str, Any]:
    """Every so many allocations one fails, while records arrive and when they have stayed."""
    visiting, plain = build(VISITING), eager()
    failed = survived = 0
    for number, nth in enumerate([1000, *range(1, 130, 6)]):
        micro_batch(plain, number)
        plain.step()
        loss = visiting(tokens(number, context.rank, visiting.module, LENGTH))
        try:
            with faults_of(context.accelerator).out_of_memory(nth):
                visiting.backward(loss)
            survived += 1
        except torch.OutOfMemoryError:
            failed += 1
            micro_batch(visiting, number)
        visiting.step()
    return {
        "visiting": values(visiting),
        "plain": values(plain),
        "failed": failed,
        "survived": survived,
    }


@pytest.mark.usefixtures("simulated")
def test_no_room_while_state_arrives(cluster: Clusters) -> None:
    (found,) = cluster(1).run(faults_body, limit=120)
    assert same([found], "visiting", "plain")
    assert min(found["failed"], found["survived"]) > 3
