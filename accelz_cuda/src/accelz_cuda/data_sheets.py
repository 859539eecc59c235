"""What data sheets say of GPUs.

NVIDIA's have dense products as half of those "with sparsity", and NVLink's bandwidth as that of both
directions together, as AMD's have the seven Infinity Fabric links of MI300X: half of it is in one. What has
no NVLink sends through PCIe. Sources: the data sheets of A100, H100, H200, L40S and MI300X, and of HGX B200
for one of its GPUs.
"""

from __future__ import annotations

from typing import NamedTuple


class DataSheet(NamedTuple):
    """peak_flops, link_bandwidth: as in `Capabilities`; 0 for not known."""

    peak_flops: float
    link_bandwidth: float


UNKNOWN = DataSheet(0.0, 0.0)
DATA_SHEETS = {
    "NVIDIA A100": DataSheet(312e12, 300e9),
    "NVIDIA H100 PCIe": DataSheet(756e12, 300e9),
    "NVIDIA H100 NVL": DataSheet(835e12, 300e9),
    "NVIDIA H100": DataSheet(989e12, 450e9),
    "NVIDIA H200 NVL": DataSheet(835e12, 450e9),
    "NVIDIA H200": DataSheet(989e12, 450e9),
    "NVIDIA B200": DataSheet(2250e12, 900e9),
    "NVIDIA L40S": DataSheet(362e12, 32e9),
    "AMD Instinct MI300X": DataSheet(1307e12, 448e9),
}
"""By how the device's name begins; a name before those that it begins with."""


def data_sheet(name: str) -> DataSheet:
    """Of the device that torch calls `name`; UNKNOWN for a part of one, and for others."""
    if " MIG " in name:
        return UNKNOWN
    return next((sheet for begin, sheet in DATA_SHEETS.items() if name.startswith(begin)), UNKNOWN)
