"""Lies of the random numbers role."""

from __future__ import annotations

import torch
from torch import Tensor

from accelz.torch_device import TorchRng
from accelz_cpu.accelerator import CpuRng

from .kept import A_LITTLE, keep


class SeedOfEightBits(CpuRng):
    def seed(self, seed: int) -> None:
        super().seed(seed & 0xFF)


class SeedRaises(CpuRng):
    def seed(self, seed: int) -> None:
        raise OverflowError("a seed of 16 bits")


class StatesKept(CpuRng):
    def get_state(self) -> Tensor:
        keep(torch.ones(A_LITTLE))
        return super().get_state()


class StateIgnored(CpuRng):
    def set_state(self, state: Tensor) -> None:
        return


class SeedIgnored(CpuRng):
    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(7)


class StateOfAnotherType(CpuRng):
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
