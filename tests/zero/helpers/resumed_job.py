"""A training job with everything that has to resume."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

import zero
from accelz.conformance.cluster import Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import LanguageModel, tokens
from tests.zero.helpers.training import adamw


class Sign(Optimizer):
    """An optimizer with state of its own: one tensor per element, a Python number and a string."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(momentum=torch.zeros_like(parameter), calls=0, note="sign")
                state["calls"] += 1
                slow, fast = state["momentum"], group["betas"]
                update = (slow * fast[0] + parameter.grad * (1 - fast[0])).sign()
                parameter.sub_(update, alpha=group["lr"] / state["calls"])
                slow.mul_(fast[1]).add_(parameter.grad, alpha=1 - fast[1])


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": adamw,
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, amsgrad=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1e-1, momentum=0.9),
    "dampened": lambda m: torch.optim.SGD(m.parameters(), lr=1e-1, momentum=0.9, dampening=0.5),
    "adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=1e-2),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "lion": lambda m: zero.Lion(m.parameters(), lr=1e-3),
    "sign": lambda m: Sign(m.parameters(), lr=1e-2),
    "adafactor": lambda m: torch.optim.Adafactor([p for p in m.parameters() if p.numel()], lr=1e-2),
}


class Job:
    """A training job with everything that has to resume: dropout, a scheduler, an order of the data."""

    def __init__(self, context: Context, optimizer: str, fresh: bool, **settings: Any) -> None:
        self.rank = context.rank
        torch.manual_seed(7 if fresh else 99)
        self.model = LanguageModel()
        if fresh:
            torch.manual_seed(100 + context.rank)  # masks differ by rank
        optimize = OPTIMIZERS[optimizer](self.model)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(optimize, [2, 5], gamma=0.5)
        self.engine = zero.initialize(self.model, optimize, zero.Config(timeout=10, **settings))
        self.order = torch.Generator().manual_seed(5 if fresh else 6)
        random.seed(3 if fresh else 4)
        np.random.seed(3 if fresh else 4)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            seed = (
                int(torch.randint(1000, (), generator=self.order))
                + random.randrange(9)
                + np.random.randint(9)
            )
            batch = tokens(seed, self.rank, self.model)
            noise = torch.rand(()).item() + torch.rand((), device=batch.device).item()
            loss = self.model(batch)["loss"] * (1 + noise)
            train_on(self.engine, loss)
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def save(self, path: str, **options: Any) -> None:
        state = {"scheduler": self.scheduler, "order": self.order.get_state(), "note": (1, {2: "two"})}
        self.engine.save_checkpoint(path, state, rank_state={"rank": self.rank}, **options)

    def load(self, path: str, **options: Any) -> Any:
        loaded = self.engine.load_checkpoint(path, restore={"scheduler": self.scheduler}, **options)
        self.order.set_state(loaded.state["order"])
        return loaded
