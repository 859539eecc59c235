"""The factors of losses and gradients; averaging, unscaling and clipping are one number on the device.

Its parts are numbers that are allocated once and written in place, so that a step need not find room for
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accelz import Accelerator
from zero.communication.communicator import Communicator
from zero.config.training import Config
from zero.errors import UsageError
from zero.gradients.loss_scale import LossScale
from zero.gradients.reducer import GradientReducer
from zero.sharding.stand_in import Multiplier
from zero.tiers.room import scalars

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class GradientFactor:
    """norm: 0-dim fp32, the norm of the gradients at the last step, before clipping; overwritten at the next
    step. None where nobody reads it, and before it is measured. by_program: whether the program itself
    has multiplied the losses of these gradients, by a GradScaler, rather than the engine by its loss scale.
    """

    def __init__(
        self,
        config: Config,
        communicator: Communicator,
        loss_scale: LossScale | None,
        accelerator: Accelerator,
    ) -> None:
        self.norm: Tensor | None = None
        self.by_program = False
        self._scale_is_given = "loss_scale" in config.model_fields_set and config.loss_scale is not None
        self._size = communicator.group.size
        self._clip_norm = config.clip_norm
        self._micro_batches = config.gradient_accumulation_steps or 1
        self._communicator = communicator
        self._loss_scale = loss_scale
        numbers = scalars(accelerator, "for the factor of the gradients", 5)
        self._mean, self._multiplied, self._norm, self._overflow, self._clip = numbers
        self._mean.fill_(1.0 / self._size)

    def begin_backward(self, by_engine: bool, more: bool) -> None:
        """Raise UsageError if gradients with and without the engine's loss scale would be added up, or if a
        loss lacks it. by_engine: whether the loss goes through `scaled`. more: to be added to others."""
        self.norm = None
        if self._loss_scale is None:
            return
        if not by_engine and self._scale_is_given:
            raise UsageError(_UNSCALED)
        if more and by_engine is self.by_program:
            raise UsageError(_MIXED)
        self.by_program = not by_engine

    def rescaling(self) -> Tensor | None:
        """0-dim; what gradients that stayed after a step are multiplied by, for others to be added to them.
        None for 1."""
        if self._loss_scale is None or self.by_program or not self._loss_scale.moved:
            return None
        return self._loss_scale.scale / self._loss_scale.of_gradients

    def drop(self) -> None:
        """There are no gradients any more, or all of them have the present scale."""
        if self._loss_scale is not None and self._loss_scale.moved:
            self._loss_scale.begin()

    def scaled(self, loss: Tensor) -> Tensor:
        """A micro-batch's part of the step's loss, times the loss scale."""
        with torch.enable_grad():  # loss.backward() works under no_grad, and so must this
            scaled = loss / self._micro_batches if self._micro_batches > 1 else loss
            if self._loss_scale is not None:
                scaled = scaled * self._loss_scale.scale.to(scaled.device)
        return scaled

    def mean(self) -> Tensor | None:
        """1 / (ranks with different data × loss scale), 0-dim fp32, overwritten at the next call; None for
        1."""
        if self._loss_scale is None:
            return None if self._size == 1 else self._mean
        if self.by_program:
            return self._mean.fill_(1.0 / self._size)
        return torch.mul(self._loss_scale.of_gradients, self._size, out=self._mean).reciprocal_()

    def product(self, multipliers: Sequence[Multiplier]) -> Tensor | None:
        """The mean factor times these, 0-dim fp32, overwritten at the next call; None for 1."""
        factor = self.mean()
        if not multipliers:
            return factor
        self._multiplied.fill_(1.0) if factor is None else self._multiplied.copy_(factor)
        for each in multipliers:
            self._multiplied.mul_(each.to(self._mean.device) if isinstance(each, Tensor) else each)
        return self._multiplied

    def complete(
        self, reducer: GradientReducer, multipliers: Sequence[Multiplier] = ()
    ) -> tuple[Tensor | None, Tensor | None]:
        """Collective. The whole factor (None: 1) of what the reducer has, and whether to skip the step (None:
        no). Nothing waits for the device.

        multipliers: what the program has multiplied all gradients by. Both results are overwritten at the
        next call. Raises OutOfMemoryError, having changed nothing.
        """
        factor = self.product(multipliers)
        if self._clip_norm is None and (self._loss_scale is None or self.by_program):
            wanted = self.norm is None and self._communicator.norm_is_read
            if self._communicator.on_any("gradient norm", wanted):
                self.norm = self.measure(reducer, factor)
            return factor, None
        self.norm = norm = self.measure(reducer, factor)
        if self._clip_norm is not None:
            clip = clip_coefficient(norm, self._clip_norm, out=self._clip)
            factor = clip if factor is None else clip.mul_(factor)
        return factor, None if self._loss_scale is None or self.by_program else self._overflow

    def attend(self, reducer: GradientReducer) -> None:
        """Take part in what `complete` exchanges with other stages, for one without gradients. Collective."""
        if self._communicator.grid.stages:
            self.by_program = self._loss_scale is not None  # the engine's own steps need a backward
            self.complete(reducer)

    def measure(self, reducer: GradientReducer, factor: Tensor | None) -> Tensor:
        """Collective over the whole job. The norm of all its gradients times `factor`, 0-dim, overwritten at
        the next call; also notes whether one of them is not finite.

        Stages may have factors of their own: a program multiplies each stage's gradients by itself.
        """
        result = reducer.norm_and_nonfinite()
        if factor is not None and self._communicator.grid.stages:
            result[0].mul_(factor * factor)
            factor = None
        if not reducer.same_everywhere:
            self._communicator.all_reduce("gradient norm", result, self._communicator.whole).wait()
        torch.gt(result[1], 0, out=self._overflow)
        norm = torch.sqrt(result[0], out=self._norm)
        return norm if factor is None else norm.mul_(factor).abs_()  # a program may turn gradients around


def clip_coefficient(norm: Tensor, max_norm: float, out: Tensor | None = None) -> Tensor:
    """What gradients of this norm are multiplied by for a norm of at most `max_norm`, as in torch."""
    return torch.add(norm, _EPSILON, out=out).reciprocal_().mul_(max_norm).clamp_(max=1.0)


_UNSCALED = (
    "loss.backward() does not multiply the loss by the loss scale that the settings ask for: call "
    "engine.backward(loss), which does, or remove Config(loss_scale=...) and use torch.amp.GradScaler"
)
_MIXED = (
    "gradients of engine.backward(loss), which multiplies the loss by the loss scale, and of "
    "loss.backward(), which does not, cannot be added up: use one of them in a step"
)
