"""fp32 parameters under torch.autocast: values are its own, and what it always casts is gathered cast."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.conftest import Abilities
from tests.zero.helpers.autocast_models import (
    Affine,
    Mixture,
    gentle,
    language_loss,
    mixture_loss,
    once,
    seeded,
)
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import WIDTH, LanguageModel, Stack, device_of, features, tokens
from tests.zero.helpers.paths import straight
from tests.zero.helpers.training import (
    relative_error,
    same_bits,
    train_averaging,
    train_reference,
    train_zero,
)

STEPS = 4
CASES: list[tuple[Callable[[], nn.Module], Any]] = [
    (once, language_loss),
    (LanguageModel, language_loss),
    (Mixture, mixture_loss),
]


def values_body(context: Context, **settings: Any) -> dict[str, Any]:
    """Compare stage 3 with stage 2, where autocast itself casts parameters, and with torch on the host."""
    found = {}
    for build, loss in CASES:
        wide = zero.Config(stage=2, reduce_dtype="fp32")
        config = zero.Config(reduce_dtype="fp32", timeout=20, **settings)
        plain, run = (train_zero(context, seeded(build), loss, c, gentle, STEPS) for c in (wide, config))
        expected = train_reference(context, seeded(build), loss, gentle, STEPS)
        found[build.__name__] = (same_bits(run, plain), relative_error(run.losses, expected.losses))
    return found


@pytest.mark.parametrize("settings", [{}, {"units": (nn.LayerNorm, nn.Embedding, "Conv1d")}, {"prefetch": 0}])
def test_values_are_those_of_plain_autocast(cluster: Clusters, settings: dict[str, Any]) -> None:
    for found in cluster(2).run(values_body, **settings):
        for name, (same, error) in found.items():
            # For two uses of a weight in one backward, autocast adds gradients in bf16, and zero may in fp32.
            assert same or name == "LanguageModel", name
            assert error < 3e-2, name  # for devices whose autocast has other lists than the host's


def dtypes_body(context: Context) -> dict[str, Any]:
    model = seeded(Stack)
    engine = zero.initialize(model, gentle(model), zero.Config(stage=3, timeout=20))
    seen: dict[str, torch.dtype] = {}

    def peek(module: nn.Module, _: Any) -> None:
        seen.update((name, p.dtype) for name, p in module.named_parameters())

    model.blocks[0].register_forward_pre_hook(peek)
    engine.traffic.clear()
    with torch.autocast(device_of(model).type, torch.bfloat16):
        loss = straight(model, 0, context.rank)
    engine.backward(loss)
    groups = [group for unit in engine.units for group in unit.groups]
    return {
        "seen": seen,
        "after": {parameter.dtype for parameter in model.parameters()},
        "gathered": engine.traffic.bytes["all_gather"],
        "reduced": engine.traffic.bytes["reduce_scatter"],
        "once": sum(g.layout.numel * (2 if g.gather_options.narrows else 4) for g in groups),
    }


def test_what_is_only_cast_travels_cast(cluster: Clusters) -> None:
    for found in cluster(2).run(dtypes_body):
        assert {n for n, d in found["seen"].items() if d is torch.bfloat16} == {"up.weight", "down.weight"}
        assert found["after"] == {torch.float32}
        assert found["gathered"] == 2 * found["once"]  # for forward and for backward
        assert found["reduced"] == found["once"]  # gradients have the dtype of the computation


def saved_body(context: Context, **settings: Any) -> tuple[int, list[str]]:
    """Bytes that autograd keeps between forward and backward, and the warnings."""
    model = seeded(lambda: nn.Sequential(*(Affine(64) for _ in range(4))))
    config = zero.Config(timeout=20, units=("Affine",), prefetch=0, **settings)
    engine = zero.initialize(model, gentle(model), config)
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    x = torch.ones(2, 64, device=engine.accelerator.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
        with keeping, torch.autocast(x.device.type, torch.bfloat16):
            loss = model(x).float().square().mean()
    held = sum(storage.nbytes() for storage in saved.values())
    engine.backward(loss)
    return held, [str(w.message) for w in caught if "autocast_modules" in str(w.message)]


def test_matrices_of_unknown_use_are_warned_of(cluster: Clusters, abilities: Abilities) -> None:
    matrix, dropped = 64 * 64 * 2, abilities.capabilities.storage_resize
    (_, (message,)), (_, nothing) = found = cluster(2).run(saved_body)
    assert "matrices of Affine (98% of the model)" in message
    assert "zero.Config(autocast_modules=('Affine',))" in message
    assert not nothing
    for held, _ in found:
        assert held > 3 * matrix  # all but the first, whose input needs no gradient
    for held, messages in cluster(2).run(saved_body, autocast_modules=("Affine",)):
        assert not messages
        assert held < matrix or not dropped
    ((_, messages),) = cluster(1).run(saved_body)
    assert not messages  # nothing is gathered


class Island(nn.Module):
    """A block that computes its router in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weights = functional.softmax(self.router(x.float()), -1)
        return self.out(weights * x)


def island_body(context: Context) -> float:
    config = zero.Config(stage=3, units=lambda name, _: name.endswith("router") or name in "01", timeout=20)
    build = lambda: nn.Sequential(Island(), Island())  # noqa: E731
    run = train_zero(context, seeded(build), mixture_loss, config, gentle, STEPS)
    expected = train_reference(context, seeded(build), mixture_loss, gentle, STEPS)
    return relative_error(run.losses, expected.losses)


def test_a_part_without_autocast_is_a_unit_of_its_own(cluster: Clusters) -> None:
    assert all(error < 1e-3 for error in cluster(2).run(island_body))


def both_ways_body(context: Context) -> list[float]:
    """Steps whose backward covers two forwards, one under autocast and one without, in either order."""
    models = [seeded(once) for _ in range(2)]
    engines = [
        zero.initialize(m, gentle(m), zero.Config(stage=stage, reduce_dtype="fp32", timeout=20))
        for m, stage in zip(models, (2, 3), strict=True)
    ]
    losses: list[list[float]] = [[], []]
    for model, engine, found in zip(models, engines, losses, strict=True):
        for step, narrow in enumerate((True, False, True)):
            with torch.autocast(device_of(model).type, torch.bfloat16, enabled=narrow):
                loss = model(tokens(step, context.rank, model))["loss"]
            with torch.autocast(device_of(model).type, torch.bfloat16, enabled=not narrow):
                loss = loss + model(tokens(step + 10, context.rank, model))["loss"]
            train_on(engine, loss)
            found.append(loss.item())
    return [abs(a - b) / b for a, b in zip(*losses, strict=True)]


def test_autocast_may_be_on_or_off(cluster: Clusters) -> None:
    for errors in cluster(2).run(both_ways_body):
        assert max(errors) < 1e-3


SCALED = (1.0, 1.0, 1e6, 1.0, 1.0, 1.0)  # factors of the loss, of which the third overflows in fp16


def fp16_loss(model: nn.Module, factor: float, step: int) -> Tensor:
    with torch.autocast(device_of(model).type, torch.float16):
        return model(tokens(step, 0, model))["loss"] * factor


def scaler_reference() -> tuple[list[float], list[float]]:
    """Losses and scales of plain training with a GradScaler."""
    model = seeded(once)
    optimizer, scaler = gentle(model), torch.amp.GradScaler("cpu", growth_interval=2)
    losses, scales = [], []
    for step, factor in enumerate(SCALED):
        loss = fp16_loss(model, factor, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


def fp16_body(context: Context) -> dict[str, Any]:
    found: dict[str, Any] = {"reference": scaler_reference()}
    for stage in (2, 3):
        model = seeded(once)
        config = zero.Config(
            stage=stage, loss_scale="dynamic", loss_scale_window=2, reduce_dtype="fp32", timeout=20
        )
        engine = zero.initialize(model, gentle(model), config)
        losses, scales = [], []
        for step, factor in enumerate(SCALED):
            loss = fp16_loss(model, factor, step)
            train_on(engine, loss)
            losses.append(loss.item())
            scales.append(engine.loss_scale.item())
        found[f"stage {stage}"] = losses, scales
    return found


def test_fp16_with_a_loss_scale_is_training_with_a_grad_scaler(cluster: Clusters) -> None:
    """Both ranks have the same data, so plain training is the reference."""
    for found in cluster(2).run(fp16_body):
        losses, scales = found["reference"]
        assert scales[2] == scales[1] / 2  # it did overflow
        for stage in (2, 3):
            assert found[f"stage {stage}"][1] == scales
            assert relative_error(found[f"stage {stage}"][0], losses) < 1e-2
        assert found["stage 2"] == found["stage 3"]


def unscaled_body(context: Context) -> list[str]:
    model = seeded(once)
    engine = zero.initialize(model, gentle(model), zero.Config(timeout=20))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            train_on(engine, fp16_loss(model, 1.0, step))
    return [str(warning.message) for warning in caught if "autocast" in str(warning.message)]


def test_fp16_without_a_loss_scale_is_warned_of_once(cluster: Clusters) -> None:
    (message,), nothing = cluster(2).run(unscaled_body)
    assert "loss_scale='dynamic'" in message
    assert not nothing


class Broken(nn.Module):
    """A model that is not one graph: its units are compiled on their own, and gathered by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel(repeat=False)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        torch._dynamo.graph_break()
        return self.model(tokens)


def broken_body(context: Context) -> list[float]:
    compiling = zero.Compile(inner="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = [
            train_zero(context, seeded(Broken), language_loss, zero.Config(stage=stage, compile=c), gentle, 3)
            for stage, c in ((2, None), (3, compiling))
        ]
    return [abs(a - b) / b for a, b in zip(*(run.losses for run in runs), strict=True)]


def test_units_that_are_compiled_by_themselves(cluster: Clusters) -> None:
    for errors in cluster(2).run(broken_body, limit=120):
        assert max(errors) < 1e-3


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 256)
        self.out = nn.Linear(256, 16)

    def forward(self, index: Tensor) -> Tensor:
        return self.out(self.table(index))


class Twice(nn.Module):
    """A unit called under autocast and right after without it; its table has the same form in both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.reader = nn.Linear(8, 8), Reader()

    def forward(self, index: Tensor) -> Tensor:
        start = self.first(torch.ones(1, 8, device=index.device)).float().sum()
        narrow = self.reader(index).float()
        with torch.autocast(index.device.type, enabled=False):
            wide = self.reader(index)
        return (narrow - wide).square().mean() + wide.square().mean() + 0 * start


def forms_body(context: Context, gather_dtype: Any, prefetch: int) -> list[float]:
    model = seeded(Twice)
    config = zero.Config(
        gather_dtype=gather_dtype,
        prefetch=prefetch,
        units=lambda name, _: name in ("first", "reader"),
        timeout=20,
    )
    engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), config)
    losses = []
    for _ in range(6):
        index = torch.arange(16, device=engine.accelerator.device) + 17 * context.rank
        with torch.autocast(index.device.type, torch.bfloat16):
            loss = model(index)
        train_on(engine, loss)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("gather_dtype", [None, "int8"])
def test_casts_that_share_a_form_share_a_gather(cluster: Clusters, gather_dtype: Any) -> None:
    on_demand = cluster(2).run(forms_body, gather_dtype=gather_dtype, prefetch=0)
    for found, expected in zip(
        cluster(2).run(forms_body, gather_dtype=gather_dtype, prefetch=2), on_demand, strict=True
    ):
        assert found == expected == [expected[0]] * 6


def long_block_body(context: Context, long: bool) -> tuple[list[float], dict[str, int]]:
    """Steps in one autocast block, or each in its own."""
    model = seeded(Stack)
    engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), zero.Config(timeout=20))
    kind, losses = engine.accelerator.device.type, []
    engine.traffic.clear()
    with torch.autocast(kind, torch.bfloat16) if long else nullcontext():
        for step in range(4):
            with torch.autocast(kind, torch.bfloat16):
                loss = straight(model, step, context.rank)
            train_on(engine, loss)
            losses.append(loss.item())
    return losses, dict(engine.traffic.calls)


def test_a_block_over_many_steps(cluster: Clusters) -> None:
    """Autocast keeps casts of weights until its block ends, but must not keep those of changed weights."""
    assert cluster(2).run(long_block_body, long=True) == cluster(2).run(long_block_body, long=False)


class Dropped(nn.Module):
    """Blocks that each rank may leave out independently (LayerDrop; Fan et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Dropped() for _ in range(3))

    def forward(self, x: Tensor, dropped: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x, index == dropped)
        return x.float().square().mean()


class _Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, dropped: bool) -> Tensor:
        return x if dropped else x + torch.tanh(self.layer(x))


def dropped_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x = features(step, rank, model)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=step % 3 != 2):
        return model(x, 1 if rank == 1 and step != 3 else 3)


def evaluated_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """A forward of another precision comes between that of the loss and its backward."""
    loss = dropped_loss(model, step, rank)
    with torch.no_grad():
        model(features(step, rank, model), 3)
    return loss


def dropped_body(context: Context, loss: Callable[[nn.Module, int, int], Tensor]) -> float:
    reference = train_averaging(context, seeded(Dropped), loss, gentle, STEPS)
    config = zero.Config(timeout=10)
    run = train_zero(context, seeded(Dropped), loss, config, gentle, STEPS)
    return relative_error(run.losses, reference.losses)


@pytest.mark.parametrize("loss", [dropped_loss, evaluated_loss])
def test_a_rank_without_gradients_reduces_in_the_dtype_of_the_others(
    cluster: Clusters, loss: Callable[[nn.Module, int, int], Tensor]
) -> None:
    assert max(cluster(2).run(dropped_body, loss=loss)) < 1e-2
