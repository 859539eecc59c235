"""Gaudi devices: roles derived from torch.hpu, collectives over HCCL, one device per process."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from accelz import (
    Accelerator,
    BackendError,
    BackendUnavailableError,
    Capabilities,
    Collectives,
    CopyAndShrink,
    Kernels,
)
from accelz.ranks import machine
from accelz.torch_device import TORCH_DEVICE, TorchAccelerator
from accelz_hpu.bridge import Bridge, import_bridge
from accelz_hpu.flat_buffers import LazyCopyAndShrink
from accelz_hpu.kernels import OPERATOR, HpuKernels
from accelz_hpu.memory import HpuMemory
from accelz_hpu.probe import is_first_generation

VISIBLE_MODULES = "HABANA_VISIBLE_MODULES"
MODULE_ID = "HLS_MODULE_ID"


class HpuAccelerator(TorchAccelerator):
    """torch.hpu as an accelerator.

    A process acquires its device in `bind` and keeps it. In that process the device is hpu:0, whichever
    module of the server it is.
    """

    def __init__(self, bridge: Bridge) -> None:
        device = torch.device("hpu", 0)
        super().__init__(
            "hpu",
            # The bridge's init_process_group and new_group take no device_id, group_desc or
            # use_local_synchronization. Naming the backend of each device type needs none of the first two.
            Collectives("cpu:gloo,hpu:hccl", member_groups=False),
            capabilities=_capabilities(bridge.lazy),
            memory=HpuMemory(torch.get_device_module("hpu"), TORCH_DEVICE.pinned_host_memory),
            flat_buffers=LazyCopyAndShrink(device) if bridge.lazy else CopyAndShrink(device),
            kernels=_kernels(bridge.lazy),
        )
        self._local_rank: int | None = None

    def device_count(self) -> int:
        """The number of modules in HABANA_VISIBLE_MODULES, one per local rank, else of all in the server."""
        listed = os.environ.get(VISIBLE_MODULES, "")
        return len(listed.split(",")) if listed else super().device_count()

    def bind(self, local_rank: int) -> None:
        """Acquire the module at place `local_rank`, or the one that HLS_MODULE_ID already names.

        Raises BackendUnavailableError if the local rank has no device or another process holds it, and
        BackendError for a second device.
        """
        if self._local_rank is None:
            self._acquire(local_rank)
            self._local_rank = local_rank
        elif local_rank != self._local_rank:
            raise BackendError(
                f"this process holds the device of local rank {self._local_rank} and cannot take that of "
                f"{local_rank}: a process keeps its device until it ends. Start one process per device "
                "(torchrun)"
            )

    def _acquire(self, local_rank: int) -> None:
        count = self.device_count()
        if local_rank >= count != 1:
            raise BackendUnavailableError(
                f"local rank {local_rank} has no hpu device: this process sees {count}. Start at most one "
                f"rank per device (torchrun --nproc-per-node), and check {VISIBLE_MODULES}"
            )
        inherited = MODULE_ID in os.environ
        try:
            self.module.set_device(min(local_rank, count - 1))  # sets HLS_MODULE_ID to the module
            self.module.init()
        except (AssertionError, RuntimeError) as error:
            raise BackendUnavailableError(
                f"no device for local rank {local_rank}: {error}. Only one process can hold a device "
                f"(hl-smi shows them); {VISIBLE_MODULES} lists the modules for the local ranks in order"
            ) from error
        finally:
            if not inherited:
                os.environ.pop(MODULE_ID, None)  # read by now; child processes must make their own choice


class LazyHpuAccelerator(HpuAccelerator):
    """Lazy mode: operations are recorded until the host needs a value or `flush` is called."""

    def __init__(self, bridge: Bridge) -> None:
        super().__init__(bridge)
        self._core = bridge.core

    def flush(self) -> None:
        """Compile and start what has been recorded."""
        self._core.mark_step()


def build() -> Accelerator:
    bridge = import_bridge()
    return LazyHpuAccelerator(bridge) if bridge.lazy else HpuAccelerator(bridge)


def _capabilities(lazy: bool) -> Capabilities:
    dtypes = {torch.float32, torch.bfloat16} | (set() if is_first_generation() else {torch.float16})
    return replace(
        TORCH_DEVICE,
        host_data_assignment=False,
        storage_resize=not lazy,
        lazy_graph=lazy,
        exact_memory=False,  # the counters include workspaces of graphs
        one_device_per_process=True,
        compile="none" if lazy else "aot_eager",
        dtypes=frozenset(dtypes),
    )


def _kernels(lazy: bool) -> Kernels:
    operator = getattr(torch.ops.hpu, OPERATOR, None)
    if operator is None:
        machine.warn(f"this bridge has no torch.ops.hpu.{OPERATOR}: AdamW uses torch's own", stacklevel=2)
        return Kernels()
    return HpuKernels(operator, lazy)
