"""The collectives role: NCCL (RCCL on ROCm) for device tensors, gloo for host tensors."""

from __future__ import annotations

import os
import socket

from torch.distributed import Store  # type: ignore[attr-defined]

from accelz.collectives import Collectives, Group

KEEP_THE_PROCESS = "2"
"""CleanUpOnly: a collective that timed out is aborted and its stream goes on. By default NCCL's watchdog
ends the process at that moment, before the engine could say which rank did not come to which unit."""


class NcclCollectives(Collectives):
    """torch's NCCL backend. shared_device: ranks may share a GPU, which NCCL refuses unless each seems to
    be on a host of its own."""

    def __init__(self, shared_device: bool) -> None:
        super().__init__("cpu:gloo,cuda:nccl")
        self._shared_device = shared_device

    def init(
        self,
        timeout: float,
        rank: int | None = None,
        world_size: int | None = None,
        store: Store | None = None,
    ) -> Group:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", KEEP_THE_PROCESS)
        if self._shared_device:
            place = os.environ.get("RANK", "0") if rank is None else rank
            os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-{place}")
        return super().init(timeout, rank, world_size, store)
