"""Lies of the random numbers role."""

from __future__ import annotations

import torch
from torch import Tensor

from accelz import HostRng
from accelz.torch_device import TorchRng

from .kept import A_LITTLE, keep


class SeedOfEightBits(HostRng):
    def seed(self, seed: int) -> None:
        super().seed(seed & 0xFF)


class SeedRaises(HostRng):
    def seed(self, seed: int) -> None:
        raise OverflowError("a seed of 16 bits")


class StatesKept(HostRng):
    def get_state(self) -> Tensor:
        keep(torch.ones(A_LITTLE))
        return super().get_state()


class StateIgnored(HostRng):
    def set_state(self, state: Tensor) -> None:
        return


class SeedIgnored(HostRng):
    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(7)


class StateOfAnotherType(HostRng):
    def get_state(self) -> Tensor:
        return super().get_state().tolist()  # type: ignore[return-value]


class StateOnTheDevice(TorchRng):
    def get_state(self) -> Tensor:
        return super().get_state().to(torch.accelerator.current_accelerator())


class FirstGenerator(TorchRng):
    def seed(self, seed: int) -> None:
        current = self._module.current_device()
        self._module.set_device(0)
        super().seed(seed)
        self._module.set_device(current)
