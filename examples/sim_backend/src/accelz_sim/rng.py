"""The RNG role: the current device's default generator."""

from __future__ import annotations

import torch
from torch import Tensor

from accelz.rng import Rng
from accelz_sim import _C


class SimRng(Rng):
    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def get_state(self) -> Tensor:
        return self._generator.get_state()

    def set_state(self, state: Tensor) -> None:
        self._generator.set_state(state)

    @property
    def _generator(self) -> torch.Generator:
        return _C.default_generator(_C.current_device())
