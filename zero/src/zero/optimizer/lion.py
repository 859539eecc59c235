"""The Lion optimizer, which torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, arXiv:2302.06675).

    Each weight moves by lr against the sign of beta1 × exp_avg + (1 - beta1) × gradient, so lr is 3 to 10
    times smaller and weight_decay (decoupled) as much larger than for AdamW. State: one value per weight.
    Under a zero engine it runs as a kernel over flat state. Raises ValueError for options out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"expected lr ≥ 0, weight_decay ≥ 0 and betas in [0, 1), got lr={lr}, "
                f"weight_decay={weight_decay}, betas={betas}"
            )
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """One step; `closure`, if given, computes the loss again and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        average, (beta1, beta2) = state["exp_avg"], group["betas"]
        gradient = parameter.grad
        assert gradient is not None
        gradient = -gradient if group["maximize"] else gradient
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(torch.lerp(average, gradient, 1 - beta1).sign_(), alpha=group["lr"])
        average.lerp_(gradient, 1 - beta2)
