"""CUDA (and ROCm) devices: roles derived from torch.cuda, NCCL, and kernels of our own."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from accelz import Accelerator
from accelz.torch_device import TORCH_DEVICE, ActiveMemory, TorchAccelerator
from accelz_cuda.collectives import NcclCollectives
from accelz_cuda.cuda_kernels import CudaKernels
from accelz_cuda.peaks import peak_flops, scaled_mm

SHARED_DEVICE = "ACCELZ_CUDA_SHARED_DEVICE"
"""If set to 1, several ranks may use one GPU. Slow; for tests on machines with a single GPU."""


class CudaAccelerator(TorchAccelerator):
    def bind(self, local_rank: int) -> None:
        """Take a device, as TorchAccelerator does, and declare its peak and its products in 8 bits."""
        super().bind(local_rank)
        peak = peak_flops(torch.cuda.get_device_name(self.device))
        products = scaled_mm(torch.cuda.get_device_capability(self.device))
        self.capabilities = replace(self.capabilities, peak_flops=peak, scaled_mm=products)


def build() -> Accelerator:
    shared = os.environ.get(SHARED_DEVICE, "") == "1"
    dtypes = TORCH_DEVICE.dtypes | {torch.float64}
    return CudaAccelerator(
        "cuda",
        NcclCollectives(shared),
        capabilities=replace(TORCH_DEVICE, shared_device=shared, compile="inductor", dtypes=dtypes),
        memory=ActiveMemory(torch.cuda, "cuda", pinned=True),
        kernels=CudaKernels(),
    )
