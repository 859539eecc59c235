"""The collectives role: NCCL (RCCL on ROCm) for device tensors, gloo for host tensors."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
from torch.distributed import Store

from accelz import CollectiveError, Collectives, Group
from accelz.ranks.bounded_store import SPARE, limited

AFTER_A_TIMEOUT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
}
"""A collective that times out is aborted, its stream goes on, and the process survives (2: CleanUpOnly). What
is computed from then on is worthless, as `NcclCollectives.check` reports. By default NCCL's watchdog ends the
process before the engine can say which rank did not reach which unit; or it tells all ranks to dump what they
did and waits a minute for that, after which the monitor ends them."""

FAVOURED = {"TORCH_NCCL_HIGH_PRIORITY": "1"}
"""NCCL's blocks are few, and everything that waits for them waits for the last one to find room."""

ON_ONE_MACHINE = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "1",
}
"""Ranks that share a GPU reach each other over the loopback interface, whatever other networks exist. They
take turns on the GPU, which a kernel that waits for another rank's holds up; so one of few blocks waits."""


class NcclCollectives(Collectives):
    """torch's NCCL backend.

    shared_device: ranks may share a GPU, which NCCL refuses unless each seems to be on a host of its own.
    """

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
        _set_defaults(AFTER_A_TIMEOUT | FAVOURED)
        if self._shared_device:
            _set_defaults(ON_ONE_MACHINE)
            # Overwritten, because ranks inherit this variable from a parent process that was itself a rank.
            os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{_place(rank)}"
        return super().init(timeout, rank, world_size, store)

    def connect(self, group: Group, device: torch.device) -> None:
        """In the first collective NCCL itself asks the job's store, and has no limit if that says nothing."""

        def first() -> None:
            with torch.cuda.device(device):  # the current device is a thread's own
                super(NcclCollectives, self).connect(group, device)
                torch.cuda.synchronize()

        limited(first, group.timeout + SPARE, "connecting ranks by NCCL", group.store.where)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, group: Group) -> torch.Tensor:
        """From torch's pool of `ncclMemAlloc` for the group, whose memory it registers with the communicator;
        ordinary memory on devices that have none. Dropped memory is used again in its stream's order."""
        library = group.process_group._get_backend(device)
        if not library.supports_tensor_alloc(device):
            return super().empty(numel, dtype, device, group)
        return library.allocate_tensor(numel, dtype=dtype, device=device)

    def check(self, group: Group) -> None:
        """Ask the watchdog: it notes an error before it aborts, and streams go on only after that."""
        error = group.process_group._get_backend(torch.device("cuda")).get_error()
        if error.name != "SUCCESS":
            raise CollectiveError(f"NCCL's watchdog has aborted a collective: {error.name}")


def _place(rank: int | None) -> str:
    """Return which of the job's ranks this is, also if `init` is called again without a rank.

    NCCL reads it only at the first collective, which may come after such a call.
    """
    if rank is not None:
        return str(rank)
    return str(dist.get_rank()) if dist.is_initialized() else os.environ.get("RANK", "0")


def _set_defaults(variables: dict[str, str]) -> None:
    for name, value in variables.items():
        os.environ.setdefault(name, value)
