"""What data sheets say of GPUs: dense matrix products in 16 bits."""

from __future__ import annotations

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
