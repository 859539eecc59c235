"""Work that keeps a device busy for a given time, for tests of what happens before and after it."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from accelz.accelerator import Accelerator

_measured: dict[str, float] = {}


def long_work(accelerator: Accelerator, seconds: float) -> Tensor:
    """Queue matrix products that keep the device busy for about `seconds`, on the current stream."""
    matrix = torch.full((1024, 1024), 1 / 1024, device=accelerator.device)
    per_product = _product_seconds(accelerator, matrix)
    for _ in range(max(1, int(seconds / per_product))):
        matrix = matrix @ matrix
    accelerator.flush()
    return matrix


def _product_seconds(accelerator: Accelerator, matrix: Tensor) -> float:
    """Seconds of one product, measured once per device."""
    key = str(accelerator.device)
    if key not in _measured:
        _ = matrix @ matrix
        accelerator.streams.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            matrix = matrix @ matrix
        accelerator.flush()
        accelerator.streams.synchronize()
        _measured[key] = max((time.perf_counter() - started) / 10, 1e-6)
    return _measured[key]
