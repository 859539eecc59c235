"""Loss scaling for fp16, without waiting for the device.

The scale follows the rule of Micikevicius et al. (Mixed Precision Training, 2018): halve it when a
gradient overflows and skip that step; double it after a run of steps without overflow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero.config import Config

INITIAL_SCALE = 2.0**16


class LossScale:
    """scale: 0-dim fp32 on the device, multiplied onto the loss. window: good steps before it doubles.

    `fixed` keeps the given scale for ever.
    """

    def __init__(self, device: torch.device, initial: float, window: int, fixed: bool) -> None:
        self.scale = torch.full((), initial, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.float32, device=device)
        self._window = window
        self._fixed = fixed

    @classmethod
    def of(cls, config: Config, device: torch.device) -> LossScale | None:
        """As the settings say; None without fp16."""
        if config.precision != "fp16":
            return None
        fixed = not isinstance(config.loss_scale, str)
        initial = INITIAL_SCALE if isinstance(config.loss_scale, str) else float(config.loss_scale)
        return cls(device, initial, config.loss_scale_window, fixed)

    def update(self, overflow: Tensor) -> None:
        """Adapt to the step just made. overflow: 0-dim, 1.0 where the step was skipped."""
        if self._fixed:
            return
        self.good_steps.copy_((self.good_steps + 1) * (1 - overflow))
        grow = (self.good_steps >= self._window).float()
        self.scale.mul_((1 - 0.5 * overflow) * (1 + grow))
        self.good_steps.mul_(1 - grow)
