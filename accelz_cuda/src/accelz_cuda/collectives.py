"""The collectives role: NCCL (RCCL on ROCm) for device tensors, gloo for host tensors."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
from torch.distributed import Store

from accelz.collectives import Collectives, Group
from accelz.errors import CollectiveError

AFTER_A_TIMEOUT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
}
"""A collective that timed out is aborted, its stream goes on, and the process stays (2: CleanUpOnly). What
is computed from then on is worthless, as `NcclCollectives.check` tells. By default NCCL's watchdog ends the
process, before the engine could say which rank did not come to which unit; or it tells all ranks to dump what
they did, waits a minute for that, and the monitor ends them then."""

ON_ONE_MACHINE = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}
"""Ranks that share a GPU reach each other over the loopback, whatever other network there is."""


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
        _set_defaults(AFTER_A_TIMEOUT)
        if self._shared_device:
            _set_defaults(ON_ONE_MACHINE)
            # Not a default: a process that was a rank itself hands its own down to the ranks it starts.
            os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{_place(rank)}"
        return super().init(timeout, rank, world_size, store)

    def check(self, group: Group) -> None:
        """The watchdog notes an error before it aborts, and streams go on only after that."""
        error = group.process_group._get_backend(torch.device("cuda")).get_error()
        if error.name != "SUCCESS":
            raise CollectiveError(f"NCCL's watchdog has aborted a collective: {error.name}")


def _place(rank: int | None) -> str:
    """Which of the job's ranks this is. NCCL reads it at the first collective: by then a job that was joined
    with a rank may have been asked for without one."""
    if rank is not None:
        return str(rank)
    return str(dist.get_rank()) if dist.is_initialized() else os.environ.get("RANK", "0")


def _set_defaults(variables: dict[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)
