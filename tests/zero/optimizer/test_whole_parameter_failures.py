"""Steps of whole parameters that fail on one rank hold up no other."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.simulated import faults_of
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.whole_optimizers import (
    Trust,
    adafactor,
    mixed,
)


class Broken(Trust):
    """Fails on ranks where its first parameter has more than ten elements."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.param_groups[0]["params"][0].numel() > 10:
            raise ZeroDivisionError("this rank's own mistake")
        super().step()


def failing_body(context: Context) -> tuple[str, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8))
    config = zero.Config(whole_parameters=True, timeout=20)
    engine = zero.initialize(model, Broken(model.parameters()), config)
    engine.backward(engine(torch.ones(2, 8, device=context.accelerator.device)).square().sum())
    with pytest.raises(Exception, match=r"step|mistake") as caught:
        engine.step()
    with pytest.raises(zero.UsageError) as after:
        engine.save_checkpoint("nowhere")
    return f"{type(caught.value).__name__}: {caught.value}", str(after.value)


def test_a_step_that_fails_on_one_rank_holds_up_no_other(cluster: Clusters) -> None:
    found = cluster(2).run(failing_body, limit=15)
    assert sorted(message for message, _ in found) == [
        "OptimizerError: the step of Broken failed on another rank, whose error says why",
        "ZeroDivisionError: this rank's own mistake",
    ]
    assert all("interrupted" in after for _, after in found)


def no_room_body(context: Context, offload: Any) -> list[tuple[str, float]]:
    """Let every allocation of a step fail in turn, on rank 1: the errors, and the seconds until them."""
    found: list[tuple[str, float]] = []
    said = [""]
    while not found or any(said):  # on any rank
        mine, seconds, said = starved_step(context, offload, len(found) + 1)
        found.append((mine, seconds))
    return found


def starved_step(context: Context, offload: Any, nth: int) -> tuple[str, float, list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)))
    config = zero.Config(precision="bf16", offload=offload, units=(nn.Sequential,), timeout=20)
    engine = zero.initialize(model, mixed(model), config)
    engine.backward(engine(torch.ones(2, 8, device=context.accelerator.device)).square().sum())
    began, said = time.monotonic(), ""
    fault = faults_of(context.accelerator).out_of_memory(nth) if context.rank == 1 else nullcontext()
    try:
        with fault:
            engine.step()
    except zero.ZeroError as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - began, engine._communicator.all_gather_object(said)


@pytest.mark.parametrize("offload", [None, zero.Offload(optimizer="host")])
@pytest.mark.usefixtures("simulated")
def test_no_room_on_one_rank_holds_up_no_other(cluster: Clusters, offload: Any) -> None:
    first, second = cluster(2).run(no_room_body, offload=offload, limit=90)
    assert len(first) == len(second) > 4
    for (said, seconds), (own, _) in zip(first[:-1], second, strict=False):
        assert "Adafactor and RMSprop failed on another rank" in said, own
        assert own.startswith("OutOfMemoryError: out of memory: no room"), own
        assert seconds < 5
    prefix = "OutOfMemoryError: out of memory: "
    told = {re.sub(r" unit '.*|, .*", "", own.removeprefix(prefix)) for own, _ in second[:-1]}
    here = {
        "no room for whole parameters of",
        "no room for the fp32 gradients of",
        "no room for the step of Adafactor and RMSprop",
    }
    assert told == {"no room to exchange whole parameters"} | (set() if offload else here)


def unreadable_body(context: Context, path: str, name: str) -> str:
    """Gradients are on disk, which fails on one rank."""
    from zero.tiers.values import Stored

    tiers = zero.Offload(optimizer="host", params="disk", gradients="disk", path=path)
    model = fresh()
    made = {"rmsprop": lambda m: torch.optim.RMSprop(m.parameters()), "adafactor": adafactor, "mixed": mixed}
    engine = zero.initialize(model, made[name](model), zero.Config(offload=tiers, timeout=10))
    engine.backward(language_loss(model, 0, context.rank))

    def broken(self: Stored, device: torch.device) -> Tensor:
        raise zero.OffloadError("the disk is broken")

    with pytest.MonkeyPatch.context() as patch:
        if context.rank == 0:
            patch.setattr(Stored, "to", broken)
        with pytest.raises(zero.OffloadError) as caught:
            engine.step()
    return str(caught.value)


@pytest.mark.parametrize("name", ["adafactor", "rmsprop", "mixed"])
def test_a_gradient_that_one_rank_cannot_read(cluster: Clusters, tmp_path: Path, name: str) -> None:
    found = cluster(2).run(unreadable_body, path=str(tmp_path), name=name, limit=15)
    assert found == ["rank 0: the disk is broken"] * 2
