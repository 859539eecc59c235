"""Loss scaling for fp16, without waiting for the device.

The scale follows the rule of Micikevicius et al. (Mixed Precision Training, 2018): halve it when a gradient
overflows, and skip that step; double it after a run of steps without overflow. It stays between LEAST and
MOST: past those, dividing gradients by it would overflow, or no halving would bring it back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelz import Accelerator
from zero.config.training import Config
from zero.tiers.room import scalars

INITIAL_SCALE = 2.0**16
LEAST, MOST = 2.0**-24, 2.0**24


class LossScale:
    """scale: 0-dim fp32 on the device; the loss is multiplied by it. window: good steps before it doubles.

    of_gradients: 0-dim, the scale of the gradients that there are: they may stay after a step that has
    changed `scale`. moved: whether there was such a step. good_steps: 0-dim, their number since the scale
    last changed. skipped: 0-dim, how many steps were skipped so far; in_a_row: 0-dim, those since the last
    that was not. fixed: whether the given scale is kept for ever.
    """

    def __init__(self, accelerator: Accelerator, initial: float, window: int, fixed: bool) -> None:
        numbers = scalars(accelerator, "for the loss scale", 6)
        self.scale, self.of_gradients, self.good_steps, self.skipped, self.in_a_row, self._factor = numbers
        self.scale.fill_(initial)
        self.of_gradients.fill_(initial)
        self.moved = False
        self._window = window
        self._fixed = fixed

    @classmethod
    def of(cls, config: Config, accelerator: Accelerator) -> LossScale | None:
        """The loss scale that the settings ask for; None if they ask for none."""
        scale = config.loss_scale
        if scale is None:
            return None
        dynamic = isinstance(scale, str)
        initial = INITIAL_SCALE if dynamic else float(scale)
        return cls(accelerator, initial, config.loss_scale_window, fixed=not dynamic)

    def restore(self, scale: float, good_steps: float, skipped: int) -> None:
        """Go on with the values of a checkpoint; a fixed scale stays as it is."""
        self.skipped.fill_(skipped)
        self.in_a_row.zero_()
        if not self._fixed:
            self.scale.fill_(scale).clamp_(LEAST, MOST)
            self.begin()
            self.good_steps.fill_(good_steps)

    def begin(self) -> None:
        """There are no gradients, or they have the present scale."""
        self.of_gradients.copy_(self.scale)
        self.moved = False

    def update(self, overflow: Tensor) -> None:
        """Adapt to the step just made. overflow: 0-dim, 1.0 if the step was skipped.

        Works in place, so that it cannot run out of memory: the weights have already changed.
        """
        self.skipped.add_(overflow)
        self.in_a_row.add_(1).mul_(overflow)
        if self._fixed:
            return
        self.moved = True
        torch.sub(1, overflow, out=self._factor)
        self.good_steps.add_(1).mul_(self._factor)
        self.scale.mul_(self._factor.add_(1).mul_(0.5))
        torch.lt(self.good_steps, self._window, out=self._factor)
        self.good_steps.mul_(self._factor)
        self.scale.mul_(torch.sub(2, self._factor, out=self._factor)).clamp_(LEAST, MOST)
