"""torchao's weights for training in 8 bits: they train as unsharded; float8 ones travel as codes.

"float8" multiplies the rounded values in fp32, "float8 products" the codes themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.frameworks.eight_bit_weights import BLOCKS, CODED, KINDS, WIDTH, built, plain_model, rowwise
from tests.zero.helpers.disks import broken_disk
from tests.zero.helpers.loops import train_on

STEPS, MORE = 3, 2


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """All ranks have the same batch, so that their mean is what one rank has."""
    batch = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
    return model(batch.to(dtype)).float().square().mean()  # type: ignore[no-any-return]


def trained(engine: zero.Engine, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of(engine.module, engine.steps)
        train_on(engine, loss)
        losses.append(loss.item())
    return losses


def unsharded(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    model = built(kind)
    optimizer, losses = adamw(model), []
    for step in range(STEPS + MORE):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, plain(model)


def plain(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the values, taken out of wrappers."""
    inside = {name: getattr(p, "_tensor", getattr(p, "_data", p)) for name, p in model.named_parameters()}
    return {name: value.detach().clone() for name, value in inside.items()}


WAYS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 2": {"stage": 2},
    "host": {"offload": zero.Offload(params="host", optimizer="host")},
    "compiled": {"compile": zero.Compile(inner="aot_eager")},
}


def body(context: Context, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS:
        found[kind] = unsharded(kind)
        for way, settings in WAYS.items() if kind in CODED else [("stage 3", {})]:
            model = built(kind)
            parameters = list(model.parameters())
            engine = zero.initialize(model, adamw(model), zero.Config(timeout=30, **settings))
            losses = trained(engine, STEPS)
            if way == "stage 3":
                engine.traffic.clear()
                engine.save_checkpoint(f"{path}/{kind}")
            losses += trained(engine, MORE)
            gathered = engine.traffic.bytes["all_gather"]
            with zero.gathered(model):
                shown = plain(model)
            same = all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
            found[f"{kind}, {way}"] = losses, engine.state_dict(), shown, same, gathered
    return found


def loaded_body(context: Context, path: str) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        model = built(kind)
        engine = zero.initialize(model, adamw(model), zero.Config(timeout=30))
        engine.load_checkpoint(f"{path}/{kind}")
        found[kind] = trained(engine, MORE), engine.state_dict()
    return found


def test_they_train_as_unsharded_and_load_at_any_number_of_ranks(cluster: Clusters, tmp_path: Path) -> None:
    saved = cluster(2).run(body, path=str(tmp_path), limit=120)
    three = cluster(3).run(loaded_body, path=str(tmp_path), limit=60)
    for kind in KINDS:
        losses, weights = saved[0][kind]
        for way in WAYS:
            ways = [each[f"{kind}, {way}"] for each in saved if f"{kind}, {way}" in each]
            for found, state, shown, same, gathered in ways:
                assert found[0] == losses[0]
                assert found == pytest.approx(losses, rel=1e-6), (kind, way)
                assert same
                for name, value in weights.items():
                    torch.testing.assert_close(shown[name], value, atol=1e-5, rtol=0)
                assert all(torch.equal(state[name], shown[name]) for name in state)
                if way == "stage 3":  # of the last block once in each step that was counted; and the biases
                    each, gathers = 1 if kind in CODED else 4, MORE * (2 * BLOCKS - 1)
                    assert gathered == pytest.approx(gathers * WIDTH * WIDTH * each, rel=0.1)
        found, state = three[0][kind]
        assert found == pytest.approx(losses[STEPS:], rel=1e-3)


def narrow_body(context: Context, kind: str) -> tuple[list[float], list[float], list[torch.dtype]]:
    """In bf16, with fp32 masters, the parameters around the weights follow."""
    model = built(kind, torch.bfloat16)
    alone, other = [], built(kind)
    engine = zero.initialize(other, adamw(other), zero.Config(precision="bf16", timeout=30))
    for step in range(2):
        alone.append(loss_of(model, step, torch.bfloat16).item())
        with zero.gathered(other):
            kinds = [p.dtype for p in other.parameters()]
            values = plain(other)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                getattr(parameter, "_tensor", parameter).copy_(values[name])
        alone[-1] = loss_of(model, step, torch.bfloat16).item()
        train_on(engine, loss := loss_of(other, step, torch.bfloat16))
        alone.append(loss.item())
    wrapped = [p for p in other.parameters() if isinstance(p, WeightWithDynamicFloat8CastTensor)]
    assert len(wrapped) == BLOCKS
    return alone[::2], alone[1::2], kinds


@pytest.mark.parametrize("kind", CODED)
def test_in_16_bits_they_have_codes_of_the_16_bit_weights(cluster: Clusters, kind: str) -> None:
    for alone, sharded, kinds in cluster(2).run(narrow_body, kind=kind):
        assert alone == sharded
        assert set(kinds) == {torch.bfloat16}


def operands_of(loss_and_backward: Callable[[], None]) -> list[Tensor]:
    """Copies of the codes that torch._scaled_mm is given: three products for each layer."""
    found, product = [], torch._scaled_mm

    def noted(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        found.extend((a.clone(), b.clone()))  # now: gathered codes are dropped after the layer
        return product(a, b, **options)

    with patch.object(torch, "_scaled_mm", noted):
        loss_and_backward()
    return found


def operands_body(context: Context) -> bool:
    """Whether a sharded step multiplies the very codes of an unsharded one."""
    model, other = built("float8 products"), built("float8 products")
    engine = zero.initialize(other, adamw(other), zero.Config(timeout=30))
    alone = operands_of(lambda: loss_of(model, 0).backward())
    sharded = operands_of(lambda: train_on(engine, loss_of(other, 0)))
    assert len(alone) == 2 * 3 * BLOCKS
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(alone, sharded, strict=True)
    )


def test_products_take_the_codes_that_were_gathered(cluster: Clusters) -> None:
    """Weights are rounded once: by the rank that has the slice."""
    assert cluster(2).run(operands_body) == [True, True]


def rowwise_body(context: Context) -> tuple[list[float], list[float]]:
    model, other = rowwise(plain_model()), rowwise(plain_model())
    optimizer, alone = adamw(model), []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        alone.append(loss.item())
    return alone, trained(zero.initialize(other, adamw(other), zero.Config(timeout=30)), STEPS)


def test_products_with_a_scale_for_each_row_train_as_unsharded(cluster: Clusters) -> None:
    for alone, sharded in cluster(2).run(rowwise_body):
        assert sharded[0] == alone[0]
        assert sharded == pytest.approx(alone, rel=1e-6)


def refused_body(context: Context) -> dict[str, str]:
    """What is said of which recipe on a device that declares less than it multiplies with."""
    declared, said = context.accelerator.capabilities, {}
    for recipe, have in (
        ("tensorwise", "none"),
        ("rowwise", "tensorwise"),
        ("rowwise_with_gw_hp", "tensorwise"),
    ):
        model = convert_to_float8_training(plain_model(), config=Float8LinearConfig.from_recipe_name(recipe))
        context.accelerator.capabilities = replace(declared, scaled_mm=have)
        with pytest.raises(zero.ModelError) as error:
            zero.initialize(model, adamw(model), zero.Config())
        said[recipe] = str(error.value)
    context.accelerator.capabilities = replace(declared, scaled_mm="none")
    emulating = built("float8")
    zero.initialize(emulating, adamw(emulating), zero.Config())
    context.accelerator.capabilities = declared
    return said


def test_a_device_without_such_products_is_told_before_training(cluster: Clusters) -> None:
    (said,) = cluster(1).run(refused_body)
    assert (
        "'0.linear' is a Float8Linear that multiplies in float8 with a scale for each matrix"
        in said["tensorwise"]
    )
    for recipe in ("rowwise", "rowwise_with_gw_hp"):
        assert "a scale for each row" in said[recipe]
        assert (
            'Float8LinearConfig.from_recipe_name("tensorwise"), Float8LinearConfig(emulate=True)'
            in said[recipe]
        )


def disk_body(context: Context, path: str) -> tuple[str, list[float]]:
    """A disk of one rank that fails in a forward: what every rank is told, and the losses afterwards."""
    model = built("float8")
    offload = zero.Offload(params="disk", optimizer="disk", path=path)
    engine = zero.initialize(model, adamw(model), zero.Config(offload=offload, timeout=10))
    failing = broken_disk(after=1) if context.rank else nullcontext()
    with failing, pytest.raises(zero.OffloadError) as failed:
        trained(engine, 1)
    engine.zero_grad()
    return str(failed.value), trained(engine, 2)


def test_a_read_error_of_one_rank_is_told_on_all(cluster: Clusters, tmp_path: Path) -> None:
    """It takes part in the exchange of scales, for which the others would wait."""
    losses = unsharded("float8")[0]
    for told, found in cluster(2).run(disk_body, path=str(tmp_path)):
        assert "could not be read from the disk" in told
        assert found == pytest.approx(losses[:2], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_before_there_are_values_they_are_made_inside_the_block(kind: str) -> None:
    with zero.init():
        inside = built(kind)
    expected = plain(built(kind))
    assert all(torch.equal(value, expected[name]) for name, value in plain(inside).items())
    with zero.init():
        bare = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH))
    with pytest.raises(zero.ModelError, match=r"'0.weight' .* convert the model inside the block"):
        zero.initialize(KINDS[kind](bare), adamw(bare), zero.Config())
