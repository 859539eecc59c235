"""A process's place in its job, as the environment gives it: torchrun's variables, or none for one rank."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from torch.distributed import HashStore

from accelz.errors import CollectiveError
from accelz.ranks.attempts import store_of_attempt


@dataclass(frozen=True)
class _Launcher:
    """Another program that starts processes, and the variables it sets in each of them."""

    name: str
    size: str
    rank: str
    local_rank: str


_LAUNCHERS = (  # mpirun may itself start its helpers with srun, so srun's numbers count last
    _Launcher("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    _Launcher("mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    # Unlike SLURM_NTASKS, this is set in srun's tasks only, not in batch scripts.
    _Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)


def place_of_this_process(timeout: float) -> dict[str, Any]:
    """Return what to pass to `init_process_group`: nothing, where torch is to read torchrun's variables.

    timeout: seconds to wait for the other ranks. A process is a job of one rank if WORLD_SIZE=1 says so, or
    if there is no sign of others. Raises CollectiveError if the variables are incomplete or wrong, and if
    another launcher started several processes that would each train alone; DistStoreError if ranks do not
    come. Empty variables count as not set.
    """
    rank, size = _value("RANK"), _value("WORLD_SIZE")
    if rank and size:
        _check_place(rank, size)
        if size != "1" and _value("MASTER_ADDR") and _value("MASTER_PORT").isdecimal():
            store = store_of_attempt(int(rank), int(size), timeout)
            return {"rank": int(rank), "world_size": int(size), "store": store}
        if size != "1" or _value("MASTER_ADDR"):
            return {}
    elif size != "1":
        _check_alone(rank, size)
    return {"rank": 0, "world_size": 1, "store": HashStore()}


def _value(name: str) -> str:
    return os.environ.get(name, "").strip()


def _check_place(rank: str, size: str) -> None:
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise CollectiveError(
            f"the environment has RANK={rank} and WORLD_SIZE={size}: they must be whole numbers, RANK from 0 "
            "on and less than WORLD_SIZE"
        )


def _check_alone(rank: str, size: str) -> None:
    """Raise if a process without both variables seems to have others beside it. size: not "1"."""
    if rank or size:
        there, missing = (f"RANK={rank}", "WORLD_SIZE") if rank else (f"WORLD_SIZE={size}", "RANK")
        raise CollectiveError(
            f"the environment has {there}, but {missing} is not set: start the ranks with torchrun, which "
            "sets both, or set neither for a job of one rank"
        )
    for launcher in sorted(_LAUNCHERS, key=lambda each: not _value(each.local_rank)):
        tasks = _value(launcher.size)
        if tasks.isdecimal() and int(tasks) > 1:
            raise CollectiveError(
                f"{tasks} processes were started by {launcher.name}, but RANK and WORLD_SIZE are not set, so "
                "each would train alone: start with torchrun, or set RANK, WORLD_SIZE and LOCAL_RANK from "
                f"{launcher.rank}, {launcher.size} and {launcher.local_rank}, and MASTER_ADDR and "
                "MASTER_PORT to a host of the job and a free port there. If each process is meant to be a "
                "job of its own, set WORLD_SIZE=1"
            )
