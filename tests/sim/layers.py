"""A model of equal layers, and the peak of the device's memory during work on it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accelz import Accelerator

WIDTH, LAYERS = 256, 6
LAYER = WIDTH * WIDTH * 4  # bytes of one fp32 layer, a multiple of 64, so that no buffer is padded
MODEL = LAYERS * LAYER


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def peak_of(accelerator: Accelerator, work: Callable[[], Any]) -> tuple[int, Any]:
    """The device's peak during `work`, and what it returned."""
    gc.collect()
    accelerator.memory.reset_peak()
    value = work()
    return accelerator.memory.stats().peak, value
