"""CUDA (and ROCm) devices: roles derived from torch.cuda, NCCL, and kernels of our own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from accelz import Accelerator
from accelz.torch_device import TORCH_DEVICE, ActiveMemory, TorchAccelerator, TorchStreams
from accelz_cuda.collectives import NcclCollectives
from accelz_cuda.cuda_kernels import CudaKernels
from accelz_cuda.data_sheets import data_sheet

SHARED_DEVICE = "ACCELZ_CUDA_SHARED_DEVICE"
"""If set to 1, several ranks may use one GPU. Slow; for tests on machines with a single GPU."""

COMMUNICATION_BUFFERS = "ACCELZ_CUDA_COMMUNICATION_BUFFERS"
"""If set to 1, gradients are reduced from memory registered with NCCL. It has not run on a GPU yet: try
`accelz check cuda` with it first."""


class CudaAccelerator(TorchAccelerator):
    def bind(self, local_rank: int) -> None:
        """Take a device, as TorchAccelerator does, and declare what is known of it."""
        super().bind(local_rank)
        sheet = data_sheet(torch.cuda.get_device_name(self.device))
        products = scaled_mm(torch.cuda.get_device_capability(self.device))
        self.capabilities = replace(self.capabilities, scaled_mm=products, **sheet._asdict())

    @contextmanager
    def profiler_range(self, name: str) -> Iterator[None]:
        """An NVTX range, which Nsight Systems shows; on ROCm one of roctx."""
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def scaled_mm(compute_capability: tuple[int, int]) -> Literal["none", "tensorwise", "rowwise"]:
    """The products in 8 bits that torch has kernels for, by its sources (ATen/native/cuda/ScaledBlas.cpp).

    No GPU has run them here. None for ROCm, where some devices take other codes, float8_e4m3fnuz.
    """
    if torch.version.hip or compute_capability < (8, 9):
        return "none"
    return "rowwise" if compute_capability >= (9, 0) else "tensorwise"


class CudaStreams(TorchStreams):
    """Streams, and graphs that are captured while other threads use the device as they like.

    pools: where each graph that is still there allocates.
    """

    def __init__(self) -> None:
        super().__init__(torch.cuda)
        self.pools = WeakKeyDictionary[Any, tuple[int, int]]()

    def _new_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def _begin(self, native: Any) -> None:
        self.pools[native] = torch.cuda.graph_pool_handle()
        native.capture_begin(self.pools[native], capture_error_mode="thread_local")


class CudaMemory(ActiveMemory):
    """Memory that captured graphs have for their replays is theirs alone: it is not free. It has been tried
    with a double of torch's allocator only, not on a GPU."""

    def __init__(self, streams: CudaStreams) -> None:
        super().__init__(torch.cuda, "cuda", pinned=True)
        self._streams = streams

    def _counters(self) -> tuple[int, int, int]:
        allocated, peak, reserved = super()._counters()
        every = chain.from_iterable(map(torch.cuda.memory_snapshot, list(self._streams.pools.values())))
        idle = sum(segment["total_size"] - segment["active_size"] for segment in every)
        return allocated, peak, reserved - idle


def build() -> Accelerator:
    shared, registered = (os.environ.get(name) == "1" for name in (SHARED_DEVICE, COMMUNICATION_BUFFERS))
    dtypes = TORCH_DEVICE.dtypes | {torch.float64}
    streams = CudaStreams()
    return CudaAccelerator(
        "cuda",
        NcclCollectives(shared),
        capabilities=replace(
            TORCH_DEVICE,
            graph_capture=True,
            shared_device=shared,
            compile="inductor",
            dtypes=dtypes,
            profiler_ranges=True,
            communication_buffers=registered,
        ),
        memory=CudaMemory(streams),
        streams=streams,
        kernels=CudaKernels(),
    )
