"""Intel GPUs: roles derived from torch.xpu, collectives over xccl."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.profiler import itt

from accelz import Accelerator, BackendUnavailableError, Collectives
from accelz.torch_device import TORCH_DEVICE, TorchAccelerator
from accelz_xpu.ipex import use_ipex
from accelz_xpu.memory import XpuMemory
from accelz_xpu.probe import selection


class XpuAccelerator(TorchAccelerator):
    """torch.xpu as an accelerator. No role touches a device before `bind`."""

    def __init__(self) -> None:
        super().__init__(
            "xpu",
            Collectives("cpu:gloo,xpu:xccl"),
            capabilities=replace(TORCH_DEVICE, compile="inductor", profiler_ranges=itt.is_available()),
            memory=XpuMemory(torch.xpu, TORCH_DEVICE.pinned_host_memory),
        )

    def bind(self, local_rank: int) -> None:
        if not self.device_count():
            raise BackendUnavailableError(
                f"torch.xpu sees no device although one is in the machine{selection()}. Check that these "
                "variables leave a device, and that the Level Zero driver is installed (`sycl-ls` lists it)"
            )
        super().bind(local_rank)

    @contextmanager
    def profiler_range(self, name: str) -> Iterator[None]:
        """A task of ITT, which VTune shows, where this build of torch has it."""
        itt.range_push(name)
        try:
            yield
        finally:
            itt.range_pop()


def build() -> Accelerator:
    use_ipex()
    return XpuAccelerator()
