"""The accelerator: what the device can do, its profiler's ranges, and the two roles that differ from torch's
usual ones.

"sim" is a proper device of torch (`torch_device.register`), so memory, streams and random numbers are
derived from the module `torch.sim`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from accelz import Accelerator, Kernels, host_collectives
from accelz.torch_device import TORCH_DEVICE, TorchAccelerator, scaling_of
from accelz_sim import NAME, profiler, torch_device
from accelz_sim.collectives import SimCollectives

CAPABILITIES = replace(
    TORCH_DEVICE,
    asynchronous=False,  # the default stream is synchronous; side streams are not
    host_data_assignment=False,  # so flat buffers are made by CopyAndShrink
    memory_granularity=1,  # no blocks: every byte is counted
    graph_capture=True,
    shared_device=True,  # each process simulates its own memory: ranks share only the name
    compile="aot_eager",
    scaled_mm=scaling_of("cpu"),  # on the host, as all products are
    profiler_ranges=True,
    dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}),
)


class SimKernels(Kernels):
    """The references in small pieces, because their scratch memory counts against the device's capacity."""

    chunk = 1 << 16


class SimAccelerator(TorchAccelerator):
    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        return profiler.ranged(name)


def build() -> Accelerator:
    torch_device.register()
    return SimAccelerator(
        NAME,
        collectives=SimCollectives(host_collectives()),
        capabilities=CAPABILITIES,
        kernels=SimKernels(),
    )
