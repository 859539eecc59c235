"""What is known of GPUs by their names and numbers: the products they make, and how many in a second."""

from __future__ import annotations

import torch

from accelz.capabilities import Scaling

PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362e12,
    "AMD Instinct MI300X": 1307e12,
}
"""Operations in a second, by how the device's name begins; a name before those that it begins with."""


def peak_flops(name: str) -> float:
    """Of the device that torch calls `name`; 0 for a part of one, and for others."""
    if " MIG " in name:
        return 0.0
    return next((peak for begin, peak in PEAKS.items() if name.startswith(begin)), 0.0)


def scaled_mm(compute_capability: tuple[int, int]) -> Scaling:
    """The products in 8 bits that torch has kernels for, by its sources (ATen/native/cuda/ScaledBlas.cpp).

    No GPU has run them here. None for ROCm, where some devices take other codes, float8_e4m3fnuz.
    """
    if torch.version.hip or compute_capability < (8, 9):
        return "none"
    return "rowwise" if compute_capability >= (9, 0) else "tensorwise"
