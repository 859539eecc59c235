"""The CPU as an accelerator: with the native library if it is there, else with plain torch and gloo."""

from __future__ import annotations

import os
import shutil
import sys

import torch

from accelz import Accelerator, Capabilities, HostRng, NullStreams
from accelz.gloo import GlooLanes
from accelz.torch_device import scaling_of
from accelz_cpu.common_memory import CommonMemory
from accelz_cpu.kernels import CpuKernels
from accelz_cpu.memory import ProcessMemory, keep_freed_memory
from accelz_cpu.native import library
from accelz_cpu.native_kernels import NativeKernels
from accelz_cpu.shared_memory import SharedMemoryCollectives


def has_compiler() -> bool:
    """Whether there is the C++ compiler with which Inductor compiles the code that it generates for CPUs."""
    usual = "clang++" if sys.platform == "darwin" else "g++"
    return shutil.which(os.environ.get("CXX") or usual) is not None


def build() -> Accelerator:
    device = torch.device("cpu")
    keep_freed_memory()
    native = library()
    memory = CommonMemory(device)
    return Accelerator(
        name="cpu",
        device=device,
        capabilities=Capabilities(
            storage_resize=True,
            host_data_assignment=True,
            async_collectives=True,
            shared_device=True,
            communication_buffers=native is not None,
            compile="inductor" if has_compiler() else "aot_eager",
            scaled_mm=scaling_of("cpu"),
            dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}),
        ),
        memory=ProcessMemory(),
        streams=NullStreams(),
        rng=HostRng(),
        collectives=SharedMemoryCollectives(native, memory) if native else GlooLanes(),
        flat_buffers=memory,
        kernels=NativeKernels(native) if native else CpuKernels(),
    )
