"""Training without any of it: each rank computes every rank's part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zero.helpers.random_runs.drawn import Drawn, optimizer_of
from tests.zero.helpers.random_runs.mosaic import Mosaic, batch


class Plain:
    """Unsharded data-parallel training on the host, with fp32 masters where computing is in 16 bits."""

    def __init__(self, drawn: Drawn, model: Mosaic, ranks: int) -> None:
        self.drawn, self.ranks = drawn, ranks
        self.masters = model
        self.narrow = drawn.precision == "bf16"
        self.model = drawn.model(drawn.seed) if self.narrow else model
        made = optimizer_of(drawn.optimizer, self.masters)
        self.optimizers = made if isinstance(made, list) else [made]
        self.micro = 0
        self.grads: dict[nn.Parameter, Tensor] = {}
        self.refresh()

    def refresh(self) -> None:
        """Weights of the masters."""
        if self.narrow:
            for master, weight in self._pairs():
                weight.data = master.data.to(torch.bfloat16) if master.is_floating_point() else master.data

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.masters.parameters(), self.model.parameters(), strict=True))

    def loss(self, step: int, rank: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.drawn.autocast):
            value: Tensor = self.model(*batch(step, rank))["loss"]
        return value

    def backward(self, step: int) -> list[float]:
        """Of all ranks; their losses."""
        return self.backward_of(lambda rank: self.loss(step, rank))

    def backward_of(self, loss: Callable[[int], Tensor]) -> list[float]:
        losses = []
        for rank in range(self.ranks):
            value = loss(rank)
            (value / self.drawn.accumulation).backward()
            losses.append(value.item())
            for master, weight in self._pairs():
                if weight.grad is not None:
                    before = self.grads.get(master, torch.zeros_like(master))
                    self.grads[master] = before + weight.grad.float() / self.ranks
                    weight.grad = None
        self.micro += 1
        return losses

    def drop(self) -> None:
        self.grads.clear()
        self.micro = 0

    def step(self) -> float | None:
        """The norm, where gradients are clipped."""
        if self.micro < self.drawn.accumulation:
            return None
        for master in self.masters.parameters():
            master.grad = self.grads.get(master)
        norm = None
        if self.drawn.clip is not None:
            norm = float(nn.utils.clip_grad_norm_(self.masters.parameters(), self.drawn.clip))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.drop()
        self.refresh()
        return norm

    def param_groups(self) -> list[dict[str, Any]]:
        return [g for o in self.optimizers for g in o.param_groups]
