"""`model.to(...)` and its like after zero.initialize: allowed where nothing changes, refused elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelz
import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import WIDTH, features

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
METHODS = {torch.float32: "float", torch.bfloat16: "bfloat16", torch.float16: "half"}
Move = Callable[[nn.Module, torch.device, torch.dtype], Any]
IDLE: dict[str, Move] = {
    "device": lambda m, device, dtype: m.to(device),
    "its name": lambda m, device, dtype: m.to(device.type),
    "dtype": lambda m, device, dtype: m.to(dtype),
    "both": lambda m, device, dtype: m.to(device=device, dtype=dtype, non_blocking=True),
    "another tensor": lambda m, device, dtype: m.to(torch.ones((), dtype=dtype, device=device)),
    "memory format": lambda m, device, dtype: m.to(memory_format=torch.channels_last),
    "device's method": lambda m, device, dtype: m._apply(lambda t: getattr(t, device.type)()),
    "dtype's method": lambda m, device, dtype: getattr(m, METHODS[dtype])(),
    "type": lambda m, device, dtype: m.to(device).type(dtype),
    "trained": lambda m, device, dtype: m.requires_grad_(),
    "parts": lambda m, device, dtype: [part.to(device, dtype) for part in m.modules()],
}
CHANGES: dict[str, Move] = {
    "`model.to` of dtype": lambda m, device, dtype: m.to(torch.float64),
    "of device": lambda m, device, dtype: m.to("meta"),
    "of format": lambda m, device, dtype: m.convolution.to(memory_format=torch.contiguous_format),
    "double": lambda m, device, dtype: m.double(),
    "type": lambda m, device, dtype: m.type(torch.float64),
    "of a part": lambda m, device, dtype: m.recurrent.to(torch.float64),
    "to_empty": lambda m, device, dtype: m.to_empty(device=device),
    "share_memory": lambda m, device, dtype: m.share_memory(),
    "in place": lambda m, device, dtype: m._apply(lambda t: t.mul_(2)),
    "other values": lambda m, device, dtype: m._apply(lambda t: torch.zeros(3)),
}


class Mixed(nn.Module):
    """Buffers before parameters, weights that a layer keeps in a list of its own, two memory formats."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Module()
        self.scale.register_buffer("steps", torch.linspace(0, 1, WIDTH))
        self.recurrent = nn.RNN(WIDTH, WIDTH)
        self.convolution = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, dtype = x * self.scale.steps.to(x), self.head.weight.dtype
        image = self.convolution(x.to(dtype).view(-1, 1, 4, WIDTH // 4)).mean(1)
        y = self.recurrent(image.reshape(1, -1, WIDTH))[0][0]
        return self.head(self.norm(y)).float().square().mean()


def built(stage: int, precision: str = "fp32", **config: Any) -> zero.Engine:
    torch.manual_seed(0)
    model = Mixed().to(accelz.current().device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    config |= {"gradient_accumulation_steps": None, "cast_buffers": precision != "fp32"}
    return zero.initialize(
        model, optimizer, zero.Config(stage=stage, precision=precision, timeout=20, **config)
    )


def facts(model: nn.Module) -> list[tuple[Any, ...]]:
    """What a move could change, besides bits. It keeps objects alive, so that none takes another's place."""
    with torch._C.DisableTorchFunctionSubclass():
        parameters = [
            (p, type(p), p.grad, p.dtype, p.device, p.stride(), p.data_ptr(), p.requires_grad, p._version)
            for p in model.parameters()
        ]
    return [*parameters, *((b, b.dtype, b.device, b.data_ptr()) for b in model.buffers())]


def unchanged(before: list[tuple[Any, ...]], now: list[tuple[Any, ...]]) -> bool:
    return all(
        a is b or (not isinstance(a, Tensor) and a == b)
        for one, other in zip(before, now, strict=True)
        for a, b in zip(one, other, strict=True)
    )


@contextmanager
def watched(engine: zero.Engine) -> Iterator[None]:
    """Moves in the block change nothing, and no rank waits for another."""
    before, calls = facts(engine.module), engine.traffic.calls.copy()
    yield
    assert unchanged(before, facts(engine.module))
    assert engine.traffic.calls == calls


def run(engine: zero.Engine, context: Context, moves: dict[str, Move], dtype: torch.dtype) -> list[float]:
    """Losses of some steps, with all the moves wherever a loop may have them."""
    model, losses = engine.module, []

    def move() -> None:
        for each in moves.values():
            with watched(engine):
                each(model, engine.device, dtype)

    for step in range(3):
        move()
        loss = model(features(step, context.rank, model))
        move()
        engine.backward(loss) if engine.loss_scale is not None else loss.backward()
        assert model.head.weight.grad is not None
        move()
        with zero.gathered(model):
            move()
        engine.step()
        losses.append(loss.item())
    return losses


def values(engine: zero.Engine) -> dict[str, Tensor]:
    with zero.gathered(engine.module):
        return {name: value.cpu().clone() for name, value in engine.module.state_dict().items()}


def idle_body(context: Context, stage: int, precision: str) -> bool:
    chosen: dict[str, Any] = {"loss_scale": 8.0} if precision == "fp16" else {}
    moved, left = built(stage, precision, **chosen), built(stage, precision, **chosen)
    dtype = DTYPES[precision]
    assert run(moved, context, IDLE, dtype) == run(left, context, {}, dtype)
    there, expected = values(moved), values(left)
    return all(torch.equal(value, expected[name]) for name, value in there.items())


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (3, "fp32"), (3, "fp16")])
def test_moves_that_change_nothing(cluster: Clusters, stage: int, precision: str) -> None:
    assert all(cluster(2).run(idle_body, stage=stage, precision=precision))


def indexed_body(context: Context) -> bool:
    engine = built(3)
    head = engine.module.head
    before = facts(head)
    head.to(torch.device(engine.device.type, engine.device.index or 0))  # as Trainer does on CPUs: cpu:0
    return unchanged(before, facts(head))


def test_a_device_may_be_named_with_an_index_that_it_has_not(cluster: Clusters) -> None:
    assert all(cluster(1).run(indexed_body))


def changes_body(context: Context, stage: int) -> dict[str, list[str]]:
    """What each move says, released, with gradients, and gathered."""
    engine = built(stage)
    model, found = engine.module, {name: list[str]() for name in CHANGES}

    def refused() -> None:
        for name, move in CHANGES.items():
            with watched(engine), pytest.raises(zero.ShardedParameterError) as caught:
                move(model, engine.device, torch.float32)
            found[name].append(str(caught.value))

    refused()
    model(features(0, context.rank, model)).backward()
    refused()
    with zero.gathered(model):
        refused()
    engine.step()
    assert run(engine, context, {}, torch.float32)
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_other_moves_are_refused_before_anything_is_moved(cluster: Clusters, device: str, stage: int) -> None:
    for found in cluster(2).run(changes_body, stage=stage):
        for name, said in found.items():
            assert len(set(said)) == 1, name
            assert "Move and convert the model before zero.initialize" in said[0]
            assert f"torch.float32 on {device}" in said[0]
        assert "'recurrent.weight_ih_l0'" in found["of a part"][0]
        assert ", to torch.float64; nothing " in found["double"][0]
        assert ", to meta; nothing " in found["of device"][0]
        assert ", to torch.contiguous_format; nothing " in found["of format"][0]
        assert ", by `empty_like`; nothing " in found["to_empty"][0]
        assert ", by `share_memory_`; nothing " in found["share_memory"][0]


class Listing(nn.Module):
    """Has a tensor that torch does not know of, and moves it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(3)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self.table = fn(self.table)
        return super()._apply(fn, recurse)


def others_body(context: Context, stage: int) -> None:
    """What is not the engine's moves as in torch: buffers, and modules that came later."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False), Listing())
    expected = copy.deepcopy(model).bfloat16().state_dict()
    settings = zero.Config(stage=stage, precision="bf16", timeout=20, gradient_accumulation_steps=None)
    model[2].forward = lambda x: x  # type: ignore[method-assign]
    engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), settings)
    assert model[1].running_mean.dtype is torch.float32
    assert model.to(engine.device, torch.bfloat16) is model
    now = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert now == {name: expected[name].dtype for name in now}
    assert model[2].table.device == engine.device
    assert model[2].table.dtype is torch.bfloat16
    model.later = nn.Linear(3, 3).requires_grad_(False)
    model[0].extra = nn.Parameter(torch.ones(2), requires_grad=False)
    model.to(engine.device, torch.bfloat16)
    for tensor in (model.later.weight, model[0].extra):
        assert (tensor.dtype, tensor.device) == (torch.bfloat16, engine.device)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_not_the_engines_moves_as_in_torch(cluster: Clusters, stage: int) -> None:
    cluster(2).run(others_body, stage=stage)


def modes_body(context: Context, stage: int) -> None:
    """Whichever way torch is told to convert modules, parameters remain the same objects."""
    ways = (
        torch.__future__.set_swap_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
    )
    for choose in ways:
        choose(True)
        try:
            engine = built(stage)
            run(engine, context, IDLE, torch.float32)
            with watched(engine), pytest.raises(zero.ShardedParameterError, match=r"to torch\.float64"):
                engine.module.double()
        finally:
            choose(False)


@pytest.mark.parametrize("stage", [1, 3])
def test_however_torch_converts_modules(cluster: Clusters, stage: int) -> None:
    cluster(2).run(modes_body, stage=stage)
