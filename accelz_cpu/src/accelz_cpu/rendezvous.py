"""How the ranks of a group find out, together, which of them can share memory.

There are three rounds through the group's store. In them, every rank says where it runs, what the other ranks
of its host have to map, and whether mapping has worked. All ranks read the same answers and so come to the
same decision.
"""

from __future__ import annotations

import os
from ctypes import CDLL
from typing import Any

from accelz import Group
from accelz.gloo import Lanes
from accelz.ranks import machine
from accelz.ranks.exchange import Exchange, unused_key
from accelz_cpu.channel import Channel
from accelz_cpu.hierarchy import Hierarchy, TwoLevels
from accelz_cpu.hosts import Hosts, find_hosts
from accelz_cpu.transport import Transport

_SEQUENCES = ("movements", "reductions")


def open_transport(library: CDLL, group: Group) -> Transport | None:
    """Connect all ranks of `group`, or return None on all of them if they have to use gloo.

    Raises RuntimeError if a rank does not answer in time. Warns, once per machine, if ranks of the same host
    have to use gloo.
    """
    exchange = Exchange(group, "accelz_cpu/transport")
    hosts = find_hosts(group, exchange)
    if not hosts.even:
        counts = ", ".join(str(len(ranks)) for ranks in hosts.ranks)
        _warn(f"the hosts have {counts} ranks; start the same number on each")
    if not hosts.even or len(hosts.here) == 1 < group.size:
        return None
    several = len(hosts.ranks) > 1
    channels = _connect_host(library, hosts, exchange, len(_SEQUENCES) if several else 1)
    if not channels or not several:
        return channels[0] if channels else None
    levels = [
        TwoLevels(library, hosts, channel, _links(group, hosts, name))
        for channel, name in zip(channels, _SEQUENCES, strict=True)
    ]
    return Hierarchy(*levels)


def _connect_host(library: CDLL, hosts: Hosts, exchange: Exchange, count: int) -> list[Channel]:
    """Open `count` channels between the ranks of each host, or none on any rank."""
    channels, problem = _create(library, hosts, count)
    mine = {"process": os.getpid(), "descriptors": [c.descriptor() for c in channels], "problem": problem}
    cards = exchange(mine)
    if not any(card["problem"] for card in cards):
        problem = _connect(channels, [cards[rank] for rank in hosts.here])
    problems = exchange(problem)
    if not any(problems):
        return channels
    for channel in channels:
        channel.close()
    reasons = "; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)
    _warn(f"they cannot share memory ({reasons})")
    return []


def _create(library: CDLL, hosts: Hosts, count: int) -> tuple[list[Channel], str]:
    try:
        return [Channel(library, hosts.place, len(hosts.here)) for _ in range(count)], ""
    except RuntimeError as error:
        return [], str(error)


def _connect(channels: list[Channel], cards: list[dict[str, Any]]) -> str:
    processes = [card["process"] for card in cards]
    try:
        for number, channel in enumerate(channels):
            channel.connect(processes, [card["descriptors"][number] for card in cards])
    except RuntimeError as error:
        return str(error)
    return ""


def _links(group: Group, hosts: Hosts, name: str) -> Lanes:
    """Open gloo lanes between the ranks that have this rank's place on their hosts."""
    key = unused_key(group, f"accelz_cpu/{name}")
    store = group.store.under(f"{key}/{hosts.place}")
    return Lanes(store, hosts.index, len(hosts.ranks), group.timeout)


def _warn(reason: str) -> None:
    machine.warn(f"the ranks of a host use gloo, which is slower: {reason}", RuntimeWarning, stacklevel=3)
