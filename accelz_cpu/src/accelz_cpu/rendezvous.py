"""How the ranks of a group find out, together, whether they can share memory.

Two rounds through the group's store: every rank says where it is and what the others have to map; then
whether mapping worked. All ranks read the same answers and so come to the same decision.
"""

from __future__ import annotations

import json
import os
import platform
import warnings
from ctypes import CDLL
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from accelz.collectives import Group
from accelz_cpu.channel import Channel

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


def open_channel(library: CDLL, group: Group, key: str) -> Channel | None:
    """Connect all ranks of `group`, or return None on all of them: gloo has to serve.

    key: different for each group of the job. Raises RuntimeError when a rank does not answer in time. Where
    ranks of one host could not share memory, rank 0 warns.
    """
    channel, problem = _create(library, group)
    if group.size == 1:
        if channel is None:
            _warn([problem])
        return channel
    mine = {"host": host(), "process": os.getpid(), "problem": problem}
    mine["descriptor"] = channel.descriptor() if channel else -1
    cards = _exchange(group, f"{key}/cards", mine)
    one_host = all(card["host"] == mine["host"] for card in cards)
    if one_host and channel and not any(card["problem"] for card in cards):
        problem = _connect(channel, cards)
    problems = _exchange(group, f"{key}/problems", problem)
    if one_host and not any(problems):
        return channel
    if channel:
        channel.close()
    if one_host and group.rank == 0:
        _warn(problems)
    return None


def host() -> list[Any]:
    """Equal on two ranks if and only if they can open each other's shared memory."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    processes = os.readlink(_PROCESSES) if _PROCESSES.exists() else ""
    return [platform.node(), boot, processes, os.getuid()]


def _create(library: CDLL, group: Group) -> tuple[Channel | None, str]:
    try:
        return Channel(library, group.rank, group.size), ""
    except RuntimeError as error:
        return None, str(error)


def _connect(channel: Channel, cards: list[dict[str, Any]]) -> str:
    try:
        channel.connect([card["process"] for card in cards], [card["descriptor"] for card in cards])
    except RuntimeError as error:
        return str(error)
    return ""


def _exchange(group: Group, key: str, value: Any) -> list[Any]:
    """Every rank's value, by rank."""
    store, limit = PrefixStore(key, group.store), timedelta(seconds=group.timeout)
    names = [str(rank) for rank in range(group.size)]
    store.set(names[group.rank], json.dumps(value))
    store.wait(names, limit)
    return [json.loads(store.get(name)) for name in names]


def _warn(problems: list[str]) -> None:
    reasons = "; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)
    warnings.warn(
        f"the ranks of this host use gloo, which is slower: they cannot share memory ({reasons})",
        RuntimeWarning,
        stacklevel=2,
    )
