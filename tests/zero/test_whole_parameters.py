"""Optimizers that look at more than single elements: whole parameters, each stepped by one rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.models import tokens
from tests.zero.test_parity import fresh, language_loss
from tests.zero.training import Run, adamw, relative_error, same_bits, state_error, train_reference, train_zero
from zero.optimizer.joint import joint
from zero.optimizer.routes import route, share_out
from zero.sharding import layout
from zero.sharding.layout import ParameterSpec

STEPS = 6


class Trust(Optimizer):
    """Momentum, scaled by the norms of parameter and update, as LARS does (You et al., 2017). It keeps a
    tensor of a shape of its own, a scalar, and a number."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"rate": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                    state["norms"] = parameter.new_zeros(2)
                    state["calls"] = 0
                state["momentum"].mul_(0.9).add_(parameter.grad)
                state["norms"].copy_(torch.stack([parameter.norm(), state["momentum"].norm()]))
                state["calls"] += 1
                ratio = state["norms"][0] / (state["norms"][1] + 1e-6)
                parameter.sub_(state["momentum"] * ratio, alpha=group["rate"])


def trust(model: nn.Module) -> Any:
    return Trust(model.parameters())


def adafactor(model: nn.Module) -> Any:
    """It divides by the number of elements."""
    return torch.optim.Adafactor([p for p in model.parameters() if p.numel()], lr=1e-2)


def muon(model: nn.Module) -> Any:
    """As it is used: for the matrices of the blocks, beside AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name]
    chosen = set(matrices)
    rest = [p for p in model.parameters() if p not in chosen]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {"trust": trust, "adafactor": adafactor, "muon": muon}
BOUNDS = {"trust": 1e-5, "adafactor": 1e-4, "muon": 3e-2}  # Muon orthogonalizes in bf16


def run_of(context: Context, name: str, steps: int = STEPS, **settings: Any) -> Run:
    config = zero.Config(timeout=20, **settings)
    return train_zero(context, fresh(), language_loss, config, OPTIMIZERS[name], steps)


def parity_body(context: Context, name: str) -> dict[str, Any]:
    plain = lambda model: joint(OPTIMIZERS[name](model))  # noqa: E731
    reference = train_reference(context, fresh(), language_loss, plain, STEPS, clip=0.5)
    runs = {stage: run_of(context, name, stage=stage, clip_norm=0.5) for stage in (0, 1, 2, 3)}
    again = run_of(context, name, stage=3, clip_norm=0.5)
    return {
        "loss": max(relative_error(run.losses, reference.losses) for run in runs.values()),
        "state": max(state_error(run.state, reference.state) if run.state else 0.0 for run in runs.values()),
        "same": same_bits(runs[1], runs[2]) and same_bits(runs[3], again),
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_it_equals_data_parallel(cluster: Clusters, size: int, name: str) -> None:
    for found in cluster(size).run(parity_body, name=name, limit=120):
        assert found["loss"] < BOUNDS[name], found
        assert found["state"] < BOUNDS[name], found
        assert found["same"]
