"""What an engine serves: several dtypes, buffers, models that are only read; and names of other engines."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import (
    device_of,
    fresh,
    language_loss,
    tokens,
)
from tests.zero.helpers.training import adamw, train_zero
from zero.migration_hints import ARGUMENT_HINTS, MIGRATION_HINTS


def copy_body(context: Context, stage: int) -> None:
    model = fresh()
    zero.initialize(model, adamw(model), zero.Config(stage=stage, timeout=10))
    expected = zero.UsageError if stage < 3 else zero.ShardedParameterError
    for each in (copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(expected, match=r"before zero\.initialize|sharded over the ranks"):
            each(model)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_that_has_an_engine_is_not_copied(cluster: Clusters, stage: int) -> None:
    cluster(2).run(copy_body, stage=stage)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.quantised = nn.Parameter(torch.arange(12, dtype=torch.int8), requires_grad=False)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.convolution(x))
        return y.square().mean() + self.wide.sum().float() + self.narrow.square().sum().float()


def mixed_dtypes_body(context: Context) -> dict[str, Any]:
    torch.manual_seed(context.rank)  # rank 0's values win, buffers included
    model = Buffered()
    if context.rank:
        model.flags.fill_(False)
        model.quantised.data.fill_(9)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=10))
    losses = []
    for step in range(3):
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step)).to(device_of(model))
        loss = model(x)
        train_on(engine, loss)
        losses.append(loss.item())
    with zero.gathered(model):
        strided = model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
        integers = model.quantised.tolist()
    dtypes = {n: str(p.dtype) for n, p in model.named_parameters()}
    return {
        "losses": losses,
        "dtypes": dtypes,
        "channels last": strided,
        "integers": integers,
        "flags": model.flags.tolist(),
    }


def test_mixed_dtypes_and_buffers(cluster: Clusters) -> None:
    results = cluster(3).run(mixed_dtypes_body)
    for found in results:
        assert found["losses"] == results[0]["losses"]  # same batch everywhere
        assert found["losses"][2] < found["losses"][0]
        assert found["dtypes"]["wide"] == "torch.float64"
        assert found["dtypes"]["narrow"] == "torch.bfloat16"
        assert found["dtypes"]["quantised"] == "torch.int8"
        assert found["channels last"]
        assert found["integers"] == list(range(12))
        assert found["flags"] == [True, False]


def two_engines_body(context: Context) -> bool:
    """Two engines in one process are independent: interleaved, they train as they do alone."""
    alone = [
        train_zero(context, fresh(), language_loss, zero.Config(stage=stage, timeout=10), steps=4).losses
        for stage in (3, 2)
    ]
    models = [fresh(), fresh()]
    engines = [
        zero.initialize(m, adamw(m), zero.Config(stage=stage, timeout=10))
        for m, stage in zip(models, (3, 2), strict=True)
    ]
    together: list[list[float]] = [[], []]
    for step in range(4):
        losses = [m(tokens(step, context.rank, m))["loss"] for m in models]
        for engine, loss, record in zip(engines, losses, together, strict=True):
            train_on(engine, loss)
            record.append(loss.item())
    return together == alone


def test_two_engines(cluster: Clusters) -> None:
    assert all(cluster(2).run(two_engines_body))


def read_only_body(context: Context, stage: Any, path: str) -> None:
    """An entirely frozen teacher, beside a model that learns from it and through it."""
    student, teacher = fresh(), fresh().requires_grad_(False)
    settings = zero.Config(stage=stage, precision="bf16", timeout=10)
    learning = zero.initialize(student, adamw(student), settings)
    reading = zero.initialize(teacher, torch.optim.AdamW(teacher.parameters()), settings)
    assert all(group.master is None for unit in reading.units for group in unit.groups)
    with torch.no_grad():
        before = teacher(tokens(0, context.rank, teacher))["loss"]
    for step in range(2):
        loss = student(tokens(step, context.rank, student))["loss"]
        learning.backward(loss + teacher(tokens(step, context.rank, teacher))["loss"])
        assert learning.step()
    reading.save_checkpoint(path)
    reading.load_checkpoint(path)
    assert torch.equal(teacher(tokens(0, context.rank, teacher))["loss"], before)
    with pytest.raises(zero.UsageError, match="does not depend on any parameter"):
        reading.backward(teacher(tokens(0, context.rank, teacher))["loss"])
    planned = fresh().requires_grad_(False)
    plan = zero.plan(planned, torch.optim.AdamW(planned.parameters()), settings, ranks=2)
    assert plan.memory.rest["device"].optimizer == 0


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_that_is_only_read_takes_no_optimizer_state(
    cluster: Clusters, stage: int, tmp_path: Path
) -> None:
    cluster(2).run(read_only_body, stage=stage, path=str(tmp_path / "teacher"))


def habits_body(context: Context) -> dict[str, str]:
    model = nn.Linear(4, 4)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
    found = {"repr": repr(engine)}
    for name in (*MIGRATION_HINTS, "parameters", "in_features", "no_such_thing"):
        with pytest.raises(AttributeError) as caught:
            getattr(engine, name)
        found[name] = str(caught.value)
    loss = model(torch.zeros(1, 4, device=device_of(model))).sum()
    positional = {
        "backward": (loss,),
        "load_state_dict": ({},),
        "save_checkpoint": ("",),
        "load_checkpoint": ("",),
    }
    for method, hints in ARGUMENT_HINTS.items():
        for name, hint in hints.items():
            with pytest.raises(zero.UsageError) as refused:
                getattr(engine, method)(*positional.get(method, ()), **{name: None})
            assert str(refused.value) == f"engine.{method}() takes no {name}=: {hint}"
    for method in ("save_checkpoint", "load_checkpoint"):
        with pytest.raises(zero.UsageError, match="takes no tag 'newest': give the checkpoint's own path"):
            getattr(engine, method)("", "newest")
    with pytest.raises(TypeError, match=r"no tuple: .* write engine = zero\.initialize"):
        _, _, _, _ = engine  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="such_thing"):
        engine.backward(loss, such_thing=True)  # type: ignore[call-arg]
    engine.backward(loss)
    return found


def test_names_of_other_engines_say_what_to_write(cluster: Clusters) -> None:
    (found,) = cluster(1).run(habits_body)
    assert "use engine.module.parameters" in found["parameters"]
    assert "use engine.module.in_features" in found["in_features"]
    assert "engine.backward(loss_a + loss_b) once" in ARGUMENT_HINTS["backward"]["retain_graph"]
    assert "call loss.backward(retain_graph=True), which works" in ARGUMENT_HINTS["backward"]["retain_graph"]
    assert "call optimizer.step(closure), which works" in ARGUMENT_HINTS["step"]["closure"]
    assert found["no_such_thing"] == "a zero.Engine has no attribute 'no_such_thing'"
    assert all(found[name].endswith(said) for name, said in MIGRATION_HINTS.items())
    assert "Engine of Linear" in found["repr"]
    assert "rank 0 of 1, after 0 steps: Config(timeout=20.0)" in found["repr"]
