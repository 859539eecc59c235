"""`zero.gathered`: whole values for a moment, changes that are kept, and what ends a change in the middle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import (
    fresh,
    language_loss,
)
from tests.zero.helpers.training import adamw
from zero.config.training import dtype_named


def gathered_body(context: Context, stage: int, precision: str) -> dict[str, Any]:
    model = fresh()
    original = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = zero.Config(stage=stage, precision=precision, timeout=10)
    engine = zero.initialize(model, adamw(model), config)
    dtype = dtype_named(config.precision) or torch.float32
    result: dict[str, Any] = {}

    with zero.gathered(model):
        result["read all"] = all(
            torch.equal(p.detach().cpu(), original[n].to(dtype)) for n, p in model.named_parameters()
        )
    weight = model.blocks[1].up.weight
    with zero.gathered(weight), zero.gathered([weight, model.gain]):
        result["nested"] = torch.equal(weight.detach().cpu(), original["blocks.1.up.weight"].to(dtype))
    result["released"] = all(u.idle or u.resident for u in engine.units)

    with torch.no_grad(), zero.gathered(weight, write_rank=context.size - 1):
        if context.rank == context.size - 1:
            weight.fill_(0.25)
            weight[0, 0] = -3.0
        else:
            weight.fill_(77.0)  # another rank's values do not count
    with zero.gathered(weight):
        result["written"] = (weight[0, 0].item(), weight[1:].min().item(), weight[1:].max().item())
    master = engine.full_master("blocks.1.up.weight")
    result["master"] = (master.dtype == torch.float32, master[0, 0].item(), master[1:].sum().item())
    other = engine.full_master("blocks.1.down.weight")
    result["others keep their fp32"] = torch.equal(
        other.cpu(), original["blocks.1.down.weight"].to(other.dtype)
    )

    for name, call in {
        "lost write": lambda: _write_without_rank(weight),
        "rank": lambda: zero.gathered(weight, write_rank=9).__enter__(),
        "name": lambda: zero.gathered("norm.weight").__enter__(),  # type: ignore[arg-type]
        "pairs": lambda: zero.gathered(model.named_parameters()).__enter__(),  # type: ignore[arg-type]
        "engine": lambda: zero.gathered(engine).__enter__(),  # type: ignore[arg-type]
        "no name": lambda: engine.full_master(weight),  # type: ignore[arg-type]
    }.items():
        try:
            call()
            result[name] = "nothing raised"
        except zero.UsageError as error:
            result[name] = str(error)
    try:
        with zero.gathered(weight):
            raise KeyError("body")
    except KeyError:
        result["exception"] = all(u.idle or u.resident for u in engine.units)
    with zero.gathered(nn.Linear(2, 2)):  # not sharded: passes through
        pass
    engine.backward(language_loss(model, 0, context.rank))
    result["works"] = engine.step()
    return result


def _write_without_rank(weight: nn.Parameter) -> None:
    with torch.no_grad(), zero.gathered(weight):
        weight.zero_()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("stage", "precision"), [(3, "fp32"), (3, "bf16"), (2, "bf16"), (0, "fp32")])
def test_gathered(cluster: Clusters, size: int, stage: int, precision: str) -> None:
    for found in cluster(size).run(gathered_body, stage=stage, precision=precision):
        assert found["read all"]
        assert found["nested"]
        assert found["released"]
        assert found["written"] == (-3.0, 0.25, 0.25)
        assert found["master"] == (True, -3.0, 28 * 12 * 0.25)
        # A frozen parameter has no fp32 master: at 16 bits its rounding is all there is.
        assert found["others keep their fp32"] or precision == "bf16"
        lost = "change is lost" if stage == 3 and size > 1 else "masters and other ranks may not"
        assert f"{lost} unless you pass write_rank" in found["lost write"]
        assert "write_rank=9 is not a rank" in found["rank"]
        for name, given in {"name": "str", "pairs": "tuple", "engine": "Engine"}.items():
            assert f"takes parameters or a module, got {given}" in found[name]
        assert "expected a parameter's name" in found["no name"]
        assert found["exception"]
        assert found["works"]


def _write_half(weight: nn.Parameter) -> None:
    with torch.no_grad(), zero.gathered(weight, write_rank=0):
        weight.fill_(7.0)
        raise ArithmeticError


def half_written_body(context: Context, stage: int) -> tuple[str, str]:
    """An error in the middle of a change."""
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(stage=stage, timeout=10))
    with pytest.raises(ArithmeticError):
        _write_half(model.norm.weight)
    try:
        loss = language_loss(model, 0, context.rank)
        engine.backward(loss)
    except zero.UsageError as error:
        return str(error), ""
    return "", f"{engine.full_master('norm.weight').max().item()}"


@pytest.mark.parametrize("stage", [2, 3])
def test_an_error_in_the_middle_of_a_change(cluster: Clusters, stage: int) -> None:
    for refused, value in cluster(2).run(half_written_body, stage=stage):
        assert ("interrupted" in refused) == (stage == 2)
        assert value == ("" if stage == 2 else "1.0")


def decorated_body(context: Context, stage: int) -> list[float]:
    """A block as a decorator of a function that is called more than once."""
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(stage=stage, timeout=10))

    @zero.gathered(model.norm.parameters(), write_rank=0)
    def fill(value: float) -> None:
        if context.rank == 0:
            nn.init.constant_(model.norm.weight, value)

    found = []
    for value in (2.0, 3.0):
        fill(value)
        found.append(engine.full_master("norm.weight").max().item())
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_block_over_an_iterator_decorates_many_calls(cluster: Clusters, stage: int) -> None:
    assert cluster(2).run(decorated_body, stage=stage) == [[2.0, 3.0]] * 2
