"""Training in the loop that `--loop` names: the engine's, which counts micro-batches, or PyTorch's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

import zero


def in_plain_loop() -> bool:
    return os.environ.get("ZERO_TEST_LOOP") == "plain"


def train_on(engine: zero.Engine, loss: Tensor) -> None:
    """A micro-batch, and a step where it is due. Engines that count or scale losses keep their own loop."""
    if in_plain_loop() and engine.config.gradient_accumulation_steps is None and engine.loss_scale is None:
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    else:
        engine.backward(loss)
        engine.step()


class Training:
    """An engine, and how it is trained. With a loss scale, even the plain loop has the engine's backward."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        config: zero.Config,
        process_group: Any = None,
    ) -> None:
        self.plain = in_plain_loop()
        self._window = config.gradient_accumulation_steps or 1
        self._scaled = config.loss_scale is not None
        self._optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        if self.plain:
            config = config.model_copy(update={"gradient_accumulation_steps": None})
        self.engine = zero.initialize(model, optimizer, config, process_group)

    def backward(self, loss: Tensor) -> None:
        """The backward of a micro-batch, of whose window the loss is the mean."""
        if not self.plain:
            self.engine.backward(loss)
            return
        loss = loss / self._window if self._window > 1 else loss
        if self._scaled:
            self.engine.backward(loss)
        else:
            loss.backward()

    def step(self) -> bool:
        """Step, where the window is complete; returns whether it is."""
        if not self.plain:
            return self.engine.step()
        if self.engine._pass.backwards < self._window:
            return False
        for optimizer in self._optimizers:
            optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        return True
