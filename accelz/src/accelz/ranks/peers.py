"""Whether the processes of other ranks are still there, as far as they are on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import psutil  # type: ignore[import-untyped]

from accelz.ranks.bounded_store import BoundedStore
from accelz.ranks.machine import machine


def card() -> list[Any]:
    """Return what this process tells the others of itself, a JSON value."""
    return [machine(), os.getpid()]


class Peers:
    """The processes of all ranks of a group. cards: by rank; those of other machines say nothing."""

    def __init__(self, cards: Sequence[Any] = ()) -> None:
        here = machine()
        self._processes = {rank: process for rank, (where, process) in enumerate(cards) if where == here}

    def of(self, ranks: Sequence[int]) -> Peers:
        """The processes of some of the ranks, numbered in the order given."""
        some = Peers()
        some._processes = {n: self._processes[r] for n, r in enumerate(ranks) if r in self._processes}
        return some

    def ended(self, store: BoundedStore, keys: Mapping[int, str]) -> str:
        """Say which ranks have ended without having set their key; "" if there are none. keys: by rank."""
        gone = [rank for rank in keys if rank in self._processes and _has_ended(self._processes[rank])]
        named = [
            f"rank {rank} (process {self._processes[rank]})" for rank in gone if not store.check([keys[rank]])
        ]
        return f"{', '.join(named)} ended" if named else ""


def _has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _is_zombie(process)


def _is_zombie(process: int) -> bool:
    """Whether a process has ended and its parent has not noticed. /proc may be of other processes than ours,
    or missing: then nothing is known."""
    try:
        ours = os.readlink("/proc/self") == str(os.getpid())
        return ours and bool(psutil.Process(process).status() == psutil.STATUS_ZOMBIE)
    except (OSError, psutil.Error):
        return False
