"""torchao's weights for training in 8 bits: they train as unsharded; float8 ones travel as codes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.frameworks.eight_bit_weights import BLOCKS, KINDS, WIDTH, built
from tests.zero.helpers.disks import broken_disk
from tests.zero.helpers.loops import train_on

STEPS, MORE = 3, 2


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """All ranks have the same batch, so that their mean is what one rank has."""
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
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
        for way, settings in WAYS.items() if kind == "float8" else [("stage 3", {})]:
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
                    each, gathers = 1 if kind == "float8" else 4, MORE * (2 * BLOCKS - 1)
                    assert gathered == pytest.approx(gathers * WIDTH * WIDTH * each, rel=0.1)
        found, state = three[0][kind]
        assert found == pytest.approx(losses[STEPS:], rel=1e-3)


def narrow_body(context: Context) -> tuple[list[float], list[float], list[torch.dtype]]:
    """In bf16, with fp32 masters, the parameters around the weights follow."""
    model = built("float8", torch.bfloat16)
    alone, other = [], built("float8")
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


def test_in_16_bits_they_have_codes_of_the_16_bit_weights(cluster: Clusters) -> None:
    for alone, sharded, kinds in cluster(2).run(narrow_body):
        assert alone == sharded
        assert set(kinds) == {torch.bfloat16}


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
