"""Captured segments of compiled graphs: the bits of calling them, whatever comes between replays."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import zero
from accelz import Graph
from accelz.conformance.cluster import Clusters, Context, preload
from tests.zero.helpers.compiled_models import FAULTS, WIDTH, Watched, fresh, tokens
from tests.zero.helpers.models import device_of
from tests.zero.helpers.training import adamw
from zero.compiled.replays import Count, Ends, Replays, Run
from zero.optimizer.captured_step import PATIENCE, STEADY

preload("zero.compiled.model")

STEPS = 9
Losses = Callable[[nn.Module, int, int], Tensor]


def plain(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(tokens(step, rank, model))


def autocast(model: nn.Module, step: int, rank: int) -> Tensor:
    with torch.autocast("sim", torch.bfloat16):
        return plain(model, step, rank)


def lengths(model: nn.Module, step: int, rank: int) -> Tensor:
    """Others in one step, and from a later one on."""
    return model(tokens(step, rank, model, length=6 if step == 4 or step > 9 else 8))


def cut_from_batches(model: nn.Module, step: int, rank: int) -> Tensor:
    """As the inputs of a language model are, when its targets are the next tokens."""
    return model(tokens(step, rank, model, length=9)[:, :-1])


def of_one_sample(model: nn.Module, step: int, rank: int) -> Tensor:
    """Whose elements lie on each other."""
    return model(tokens(step, rank, model)[:1].expand(3, -1))


def always_others(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(tokens(step, rank, model, length=5 + step % 3))


def evaluating(model: nn.Module, step: int, rank: int) -> Tensor:
    with torch.no_grad():
        model(tokens(step + 50, rank, model))
    model(tokens(step + 60, rank, model))  # dropped
    return plain(model, step, rank)


def two_forwards(model: nn.Module, step: int, rank: int) -> Tensor:
    return (
        plain(model, step, rank) + plain(model, step + 30, rank) * 0.5
        if step > 5
        else plain(model, step, rank)
    )


def held(model: nn.Module, step: int, rank: int) -> Tensor:
    with zero.gathered(model):
        if step % 2:
            return plain(model, step, rank)
    return plain(model, step, rank)


def saved_elsewhere(model: nn.Module, step: int, rank: int) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return plain(model, step, rank)


def both_halves(model: nn.Module, step: int, rank: int) -> Tensor:
    """With a gradient of an input, which another part of the program has computed."""
    x = tokens(step, rank, model).float()[:, :4, None].expand(-1, -1, 32) / 512
    given = (x * 2).requires_grad_()
    return model(given) + given.grad.sum() if given.grad is not None else model(given)


class Odd(nn.Module):
    """Random numbers, a buffer that is written, results that share memory, and an input that comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, 32))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        y = x - self.mean
        for layer in self.layers:
            y = torch.nn.functional.dropout(layer(y).tanh(), 0.2, training=self.training) + x
        return y, y[:, 1:], x


KEPT: list[Tensor] = []
INPUTS: list[Tensor] = []


def odd_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(6, 4, 32, generator=generator).to(device_of(model)).requires_grad_()
    y, part, same = model(x)
    assert same is x
    KEPT.append(y.detach())
    with torch.no_grad():
        model.eval()
        KEPT.extend(model(x)[:2])
        KEPT[-1].zero_()  # and with it a part of the result before it
        model.train()
    loss = y.square().mean() + part.sum() * 1e-3
    INPUTS.append(x)
    return loss


def _engine(
    graphs: bool | None, kind: str = "straight", inner: Any = "aot_eager", **settings: Any
) -> zero.Engine:
    """graphs: whether they are captured; None to train eagerly."""
    torch.manual_seed(3)
    made = {"odd": Odd, "watched": Watched}
    model = made[kind]() if kind in made else fresh(kind)
    compile = None if graphs is None else zero.Compile(inner=inner, graphs=graphs)
    return zero.initialize(model, adamw(model), zero.Config(compile=compile, timeout=20, **settings))


def _step(engine: zero.Engine, loss: Losses, step: int, rank: int, spoiled: bool = False) -> Tensor:
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + step)
    for turn in range(engine.config.gradient_accumulation_steps or 1):
        found = loss(engine.module, step + 100 * turn, rank)
        engine.backward(found * 1e38 if spoiled else found)
        engine.step()
    return found


def _count(engine: zero.Engine) -> Count:
    found = engine.explain().replays
    assert found is not None
    return found


def _values(engine: zero.Engine) -> dict[str, Tensor]:
    names = [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    values = {name: engine.full_master(name).cpu() for name in names}
    return values | {name: buffer.cpu() for name, buffer in engine.module.named_buffers()}


def _same(engines: list[zero.Engine]) -> None:
    called, replayed = (_values(engine) for engine in engines)
    assert [name for name, value in called.items() if not torch.equal(replayed[name], value)] == []


def bits_body(
    context: Context,
    loss: Losses = plain,
    steps: int = STEPS,
    spoiled: int | None = None,
    kind: str = "straight",
    calls: bool = False,
    **settings: Any,
) -> Count:
    """calls: compare with calls of graphs, where eager training has other bits or leaves other memory. It
    compiles nothing."""
    engines, losses, kept = [], [], []
    for graphs in (False if calls else None, True):
        engine = _engine(graphs, kind, **settings)
        KEPT.clear()
        INPUTS.clear()
        torch.manual_seed(7)
        losses.append([_step(engine, loss, step, context.rank, step == spoiled) for step in range(steps)])
        kept.append([each.cpu() for each in (*KEPT, *(x.grad for x in INPUTS if x.grad is not None))])
        engines.append(engine)
    KEPT.clear()
    INPUTS.clear()
    assert [each.item() for each in losses[1]] == [each.item() for each in losses[0]]
    assert all(map(torch.equal, *kept))
    _same(engines)
    return _count(engines[1])


def bits_on_a_late_stream_body(context: Context, **settings: Any) -> Count:
    streams = context.accelerator.streams
    with streams.use(streams.new()):
        return bits_body(context, **settings)


# Cases, with the ranks and the replays that there are at least.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "stage 3": (1, 17, {}),
    "accumulated": (
        2,
        40,
        {"stage": 2, "gradient_accumulation_steps": 2, "precision": "bf16", "loss": evaluating},
    ),
    "clipped": (2, 4, {"stage": 0, "clip_norm": 0.1, "precision": "bf16", "loss": held, "calls": True}),
    "an overflow": (
        1,
        4,
        {"stage": 1, "precision": "fp16", "spoiled": 7, "loss": two_forwards, "calls": True},
    ),
    "lengths": (1, 10, {"loss": lengths, "steps": 24}),
    "cut from batches": (2, 8, {"loss": cut_from_batches, "stage": 2}),
    "odd": (1, 20, {"loss": odd_loss, "kind": "odd", "calls": True}),
    "saved elsewhere": (1, 4, {"loss": saved_elsewhere}),
}
MORE: dict[str, tuple[int, int, dict[str, Any]]] = {
    "autocast": (2, 8, {"loss": autocast, "stage": 1, "calls": True}),
    "checkpointed": (1, 8, {"kind": "checkpointed"}),
    "always others": (1, 0, {"loss": always_others}),
    "of one sample": (1, 0, {"loss": of_one_sample}),
    "gathered": (2, 0, {"persistent_below": 2000}),
    "offloaded": (2, 0, {"offload": zero.Offload(optimizer="host", params="host")}),
    "odd": (2, 20, {"loss": odd_loss, "kind": "odd", "stage": 1, "calls": True}),
}


def _check(sim: Clusters, ranks: int, replays: int, settings: dict[str, Any]) -> None:
    for count in sim(ranks).run(bits_body, limit=240, **settings):
        assert not count.failed
        assert count.replayed >= replays


@pytest.mark.parametrize("case", CASES)
def test_replays_have_the_bits_of_calls(sim: Clusters, case: str) -> None:
    """With learning rates that change in each step."""
    _check(sim, *CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_more_replays_have_the_bits_of_calls(sim: Clusters, case: str) -> None:
    _check(sim, *MORE[case])


def test_replays_are_in_the_order_of_their_stream(sim: Clusters) -> None:
    (count,) = sim(1).run(bits_on_a_late_stream_body, limit=120)
    assert count.replayed >= 17


def features(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(2, WIDTH, generator=generator).to(device_of(model)))


class Pair:
    """Two engines that train alike, one of which replays."""

    def __init__(self, rank: int) -> None:
        self.engines = [_engine(graphs, "watched", stage=2) for graphs in (False, True)]
        self.replayed = self.engines[1]
        self._rank, self._step = rank, 0

    def train(self, steps: int) -> Count:
        for _ in range(steps):
            called, replayed = (_step(e, features, self._step, self._rank).item() for e in self.engines)
            assert called == replayed
            self._step += 1
        _same(self.engines)
        return _count(self.replayed)


def between_body(context: Context, path: str) -> None:
    """What else raises, or changes weights, memory or modes, between steps that are replayed."""
    memory, pair = context.accelerator.memory, Pair(context.rank)
    first = pair.train(8)
    assert first.captured > 0
    for where in ("forward", "backward"):
        FAULTS.add(where)
        for engine in pair.engines:
            with pytest.raises(ArithmeticError):
                engine.backward(features(engine.module, 0, context.rank))
        FAULTS.clear()
    for engine in pair.engines:
        with zero.gathered(engine.module, write_rank=0), torch.no_grad():
            engine.module.head.weight.mul_(1.5)
    before = _count(pair.replayed)
    after = pair.train(2)
    assert after.replayed == before.replayed + 2 * first.captured
    for name, engine in zip(("called", "replayed"), pair.engines, strict=True):
        engine.save_checkpoint(f"{path}/{name}")
    pair.train(2)
    for name, engine in zip(("replayed", "called"), pair.engines, strict=True):
        engine.load_checkpoint(f"{path}/{name}")
    assert pair.train(8).captured == first.captured
    held = memory.stats().allocated
    pair.replayed.offload_states()
    gone = _count(pair.replayed)
    assert gone.captured == gone.nbytes == 0
    assert memory.stats().allocated < held - first.nbytes
    pair.replayed.reload_states()
    assert pair.train(8).captured == first.captured
    assert memory.stats().allocated == held


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_and_memory_may_change_between_replays(sim: Clusters, ranks: int, tmp_path: Path) -> None:
    sim(ranks).run(between_body, limit=120, path=str(tmp_path))


def memory_body(context: Context) -> None:
    memory = context.accelerator.memory
    gc.collect()  # what earlier tests have left is not to go meanwhile
    before = memory.stats().allocated
    pair = Pair(context.rank)
    pair.train(8)
    held = memory.stats().allocated
    count = pair.train(4)
    assert memory.stats().allocated == held
    assert count.nbytes > 0
    del pair
    gc.collect()
    assert memory.stats().allocated - before <= 0


def test_graphs_go_with_their_engine(sim: Clusters) -> None:
    """Until then they keep what they were captured with, and no more."""
    sim(1).run(memory_body)


def no_room_body(context: Context) -> None:
    from accelz_sim import faults

    pair = Pair(context.rank)
    pair.train(STEADY + 1)
    x = torch.ones(2, WIDTH, device=context.accelerator.device)
    with faults.out_of_memory(1), pytest.warns(RuntimeWarning, match="could not be captured.*OutOfMemory"):
        pair.replayed.module(x)
    count = pair.train(8)
    assert "not all can be, because: OutOfMemoryError" in str(pair.replayed.explain())
    assert 0 < count.captured < count.segments


def test_a_segment_that_cannot_be_captured_is_called(sim: Clusters) -> None:
    sim(1).run(no_room_body)


class Broken(Graph):
    def replay(self) -> None:
        raise RuntimeError("lost")


def broken_body(context: Context) -> None:
    pair, streams = Pair(context.rank), context.accelerator.streams
    streams.capture = lambda run: [run(), Broken()][1]  # type: ignore[method-assign]
    try:
        with pytest.warns(
            RuntimeWarning, match="could not be captured and is called each time: Runtime.*lost"
        ):
            count = pair.train(6)
    finally:
        del streams.capture
    assert count.captured == count.replayed == 0


def test_a_replay_that_fails_at_once_is_called(sim: Clusters) -> None:
    sim(1).run(broken_body)


def alone_body(context: Context, run: Run, host: bool, why: str) -> None:
    """One segment by itself, whose operation a compiler has made `run` of."""
    device = context.accelerator.device
    x, y = torch.ones(4, device=device), torch.ones((), device=device)
    module = make_fx(lambda x, y: (x * y) * 2, tracing_mode="fake")(x, y)
    y = y.cpu() if host else y
    Ends(frozenset()).note(module)
    replays = Replays(context.accelerator)
    graph = replays.make(module, lambda module, inputs: run)
    for _ in range(STEADY):
        graph([x, y])
    with pytest.warns(RuntimeWarning, match=f"is called each time: {why}"):
        graph([x, y])
    graph([x, y])
    count = replays.count()
    assert (count.captured, count.replayed, count.called) == (0, 0, STEADY + 2)
    assert re.match(why, count.failed)


def first(inputs: Sequence[Any]) -> Sequence[Any]:
    return [inputs[0]]


@pytest.mark.parametrize(
    ("host", "why"),
    [(False, "a result of it lies in the memory"), (True, "it reads a tensor that is not on the device")],
)
def test_segments_that_are_called_for_ever_tell_why(sim: Clusters, host: bool, why: str) -> None:
    sim(1).run(alone_body, run=first, host=host, why=why)


def never_body(context: Context) -> None:
    engine = _engine(True, "watched")

    def train() -> None:
        for step in range(PATIENCE // 2):
            x = torch.ones(2 + step % 2, WIDTH, device=device_of(engine.module))
            engine.backward(engine.module(x))
            engine.step()

    with pytest.warns(RuntimeWarning, match=r"graphs=True\) has had no effect in 100 runs"):
        train()


def test_graphs_without_effect_are_told(sim: Clusters) -> None:
    sim(1).run(never_body)


def test_activations_that_leave_are_refused() -> None:
    with pytest.raises(zero.ConfigError, match="graphs keep the activations' memory"):
        zero.Config(compile=zero.Compile(graphs=True), offload=zero.Offload(activations="host"))
