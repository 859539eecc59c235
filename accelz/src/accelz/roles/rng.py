"""The RNG role: the device's default generator."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Rng(ABC):
    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the device's default generator. Different seeds below 2**32 give different numbers."""

    @abstractmethod
    def get_state(self) -> Tensor:
        """Return the generator's state, a uint8 tensor on the host."""

    @abstractmethod
    def set_state(self, state: Tensor) -> None:
        """Restore a state of the generator that `get_state()` returned."""


class HostRng(Rng):
    """The host's default generator: for the host, and for devices whose numbers the host draws."""

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_state(self) -> Tensor:
        return torch.default_generator.get_state()

    def set_state(self, state: Tensor) -> None:
        torch.default_generator.set_state(state)
