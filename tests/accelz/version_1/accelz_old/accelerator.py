"""The accelerator: what the device can do, and one attribute per role."""

from __future__ import annotations

from accelz.host_staged import HostStaged

from accelz.accelerator import Accelerator
from accelz.capabilities import Capabilities
from accelz.torch_device import TorchAccelerator
from accelz_old.kernels import OldKernels
from accelz_sim import torch_device

CAPABILITIES = Capabilities(
    streams=True,
    pinned_host_memory=True,
    host_data_assignment=False,
    exact_memory=True,
)


def build() -> Accelerator:
    torch_device.register()
    return TorchAccelerator(
        "old", HostStaged(), device_type="sim", capabilities=CAPABILITIES, kernels=OldKernels()
    )
