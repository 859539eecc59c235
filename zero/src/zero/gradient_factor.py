"""What gradients are multiplied by: averaging, unscaling and clipping, one number on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from zero.communicator import Communicator
from zero.config import Config
from zero.gradients import GradientReducer
from zero.precision import LossScale

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class GradientFactor:
    """norm: 0-dim fp32, of the gradients at the last step, before clipping; None where nothing asks."""

    def __init__(
        self,
        config: Config,
        communicator: Communicator,
        reducer: GradientReducer,
        loss_scale: LossScale | None,
        device: torch.device,
    ) -> None:
        self.norm: Tensor | None = None
        self._clip_norm = config.clip_norm
        self._sliced = config.stage > 0 and communicator.group.size > 1
        self._communicator = communicator
        self._reducer = reducer
        self._loss_scale = loss_scale
        self._device = device

    def mean(self) -> Tensor | None:
        """1 / (world size × loss scale), 0-dim fp32; None for 1."""
        size = self._communicator.group.size
        if self._loss_scale is not None:
            return 1.0 / (self._loss_scale.scale * size)
        return None if size == 1 else torch.full((), 1.0 / size, dtype=torch.float32, device=self._device)

    def expected(self) -> tuple[Tensor | None, Tensor | None]:
        """What `complete` returns where nothing is clipped and nothing overflows."""
        factor, device = self.mean(), self._device
        if factor is None and self._clip_norm is not None:
            factor = torch.ones((), dtype=torch.float32, device=device)
        skip = None if self._loss_scale is None else torch.zeros((), dtype=torch.float32, device=device)
        return factor, skip

    def complete(self) -> tuple[Tensor | None, Tensor | None]:
        """Collective. The whole factor (None: 1) and whether to skip the step; nothing waits."""
        factor = self.mean()
        if self._loss_scale is None and self._clip_norm is None:
            return factor, None
        norm, overflow = self._global_norm(factor)
        self.norm = norm
        if self._clip_norm is not None:
            clip = (self._clip_norm / (norm + _EPSILON)).clamp(max=1.0)
            factor = clip if factor is None else factor * clip
        return factor, overflow if self._loss_scale is not None else None

    def _global_norm(self, factor: Tensor | None) -> tuple[Tensor, Tensor]:
        result = self._reducer.norm_and_nonfinite()
        if self._sliced:
            self._communicator.all_reduce("gradient norm", result).wait()
        norm = result[0].sqrt()
        return norm if factor is None else norm * factor, (result[1] > 0).float()
