"""The accelerator: what it can do, and its roles put together."""

from __future__ import annotations

import torch

from accelz.accelerator import Accelerator
from accelz.capabilities import Capabilities
from accelz.flat_buffer import CopyAndShrink
from accelz.kernels import Kernels
from accelz_sim import _C, torch_device
from accelz_sim.collectives import HostStaged
from accelz_sim.memory import SimMemory
from accelz_sim.rng import SimRng
from accelz_sim.streams import SimStreams

CAPABILITIES = Capabilities(
    asynchronous=False,  # the default stream is not; side streams are
    streams=True,
    pinned_host_memory=True,
    storage_resize=True,
    host_data_assignment=False,
    async_collectives=True,
    exact_memory=True,
    shared_device=True,  # each process simulates its own memory: ranks share nothing but the name
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}),
)


class SimKernels(Kernels):
    """The references in small pieces: their scratch memory counts against the device's capacity."""

    chunk = 1 << 16


class SimAccelerator(Accelerator):
    def device_count(self) -> int:
        return _C.DEVICES

    def bind(self, local_rank: int) -> None:
        index = local_rank % _C.DEVICES
        _C.exchange_device(index)
        self.device = torch.device(torch_device.NAME, index)
        self.flat_buffers.device = self.device


def build() -> Accelerator:
    torch_device.register()
    device = torch.device(torch_device.NAME, _C.current_device())
    return SimAccelerator(
        name=torch_device.NAME,
        device=device,
        capabilities=CAPABILITIES,
        memory=SimMemory(),
        streams=SimStreams(),
        rng=SimRng(),
        collectives=HostStaged(),
        flat_buffers=CopyAndShrink(device),
        kernels=SimKernels(),
    )
