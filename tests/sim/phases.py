"""One step of a small model, phase by phase, in which faults strike."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Context

LAYERS = 2
WIDTH = 8  # square layers are cut in the middle, so that all ranks allocate, and fail, alike
PHASES = ("init", "forward", "backward", "step")


class Run:
    """A model trained for one step, phase by phase."""

    def __init__(self, context: Context, config: zero.Config, optimizer: str, autocast: bool = False) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.config = config
        self.autocast = autocast
        self.model = nn.Sequential(*layers)
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=1e-2)
        self.x = torch.full((2, WIDTH), 0.1, device=context.accelerator.device)
        self.engine: zero.Engine
        self.loss: Tensor

    def init(self) -> None:
        self.engine = zero.initialize(self.model, self.optimizer, self.config)

    def forward(self) -> None:
        with torch.autocast(self.x.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            self.loss = self.engine(self.x).float().square().mean()

    def backward(self) -> None:
        self.engine.backward(self.loss)

    def step(self) -> None:
        assert self.engine.step()

    def until(self, phase: str) -> Run:
        for name in PHASES[: PHASES.index(phase)]:
            getattr(self, name)()
        return self

    def result(self) -> list[Tensor]:
        """Everything that a step changes."""
        state = self.engine.state_dict(master=True)
        scale = self.engine.loss_scale
        return [*state.values(), *([] if scale is None else [scale.cpu()])]
