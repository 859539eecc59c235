"""Optimizers that need whole parameters, beside some that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import zero

STEPS = 4


class Trust(Optimizer):
    """Momentum, scaled by the norms of parameter and update as in LARS (You et al., 2017).

    It keeps tensors of other shapes than the parameter's, also in a list, and a number, and it puts matrices
    into new memory.
    """

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
                    state["sums"] = [parameter.new_zeros(3), torch.zeros_like(parameter)]
                    state["calls"] = 0
                state["momentum"].mul_(0.9).add_(parameter.grad)
                state["norms"].copy_(torch.stack([parameter.norm(), state["momentum"].norm()]))
                state["calls"] += 1
                state["sums"][0].add_(parameter.sum())
                state["sums"][1].add_(parameter)
                ratio = state["norms"][0] / (state["norms"][1] + 1e-6)
                stepped = parameter - group["rate"] * ratio * state["momentum"]
                if parameter.dim() == 2:
                    parameter.data = stepped
                else:
                    parameter.copy_(stepped)


def trust(model: nn.Module) -> Any:
    return Trust(model.parameters())


def adafactor(model: nn.Module) -> Any:
    """Adafactor, without parameters that have no elements, since it divides by their number."""
    return torch.optim.Adafactor([p for p in model.parameters() if p.numel()], lr=1e-2)


def muon(model: nn.Module) -> Any:
    """Muon as it is used: for blocks' matrices, beside AdamW for the rest, whose slices a kernel steps."""
    matrices = [p for name, p in model.named_parameters() if _is_muons(name, p)]
    chosen = set(matrices)
    rest = [p for p in model.parameters() if p not in chosen]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


def slices(model: nn.Module) -> Any:
    """Two optimizers that work element-wise, one of them served by a kernel."""
    matrices, others = (
        [p for p in model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False)
    )
    return [torch.optim.RMSprop(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-2)]


def kernels(model: nn.Module) -> Any:
    """Two optimizers served by kernels, with different state, in the same units."""
    every = list(model.parameters())
    return [torch.optim.AdamW(every[::2], lr=1e-2), zero.Lion(every[1::2], lr=1e-3)]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "trust": trust,
    "adafactor": adafactor,
    "muon": muon,
    "slices": slices,
    "kernels": kernels,
}


def _is_muons(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2 and "blocks" in name


def mixed(model: nn.Module) -> Any:
    """Two optimizers that step themselves: matrices whole, and everything else by slices."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Adafactor(matrices, lr=1e-2), torch.optim.RMSprop(others, lr=1e-3)]
