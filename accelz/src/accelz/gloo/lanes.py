"""gloo collectives in lanes, so that ranks that disagree get an error instead of a crash.

When two ranks of a gloo group meet in collectives of different sizes, gloo's transport thread throws and the
process dies. Here every (operation, bytes) of a group has a gloo context of its own, a lane, made at first
use. Ranks that issue different collectives then wait in different lanes, and each gets a CollectiveError when
the group's timeout has passed.

For backends whose collectives run on host tensors: a CPU, or a device whose data is staged through the host.
"""

from __future__ import annotations

import atexit
import os
import resource
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelz.errors import CollectiveError
from accelz.ranks.bounded_store import BoundedStore
from accelz.ranks.exchange import unused_key
from accelz.ranks.group import Group
from accelz.roles import direct_exchange
from accelz.roles.collectives import Collectives
from accelz.roles.direct_exchange import as_bytes, is_small

_TORCHS = timedelta(minutes=30)  # torch's default
SPARE_DESCRIPTORS = 16
"""File descriptors left for what opening a lane takes for a moment, and for the rest of the process."""


class Lanes:
    """The gloo contexts of one group of ranks.

    store: one that all of them can reach. timeout: of each collective, in seconds. Several threads may
    ask for lanes.
    """

    def __init__(self, store: BoundedStore, rank: int, size: int, timeout: float) -> None:
        self._store = store.within(timeout)
        self._rank = rank
        self._size = size
        self._timeout = timedelta(seconds=timeout)
        self._lanes: dict[tuple[str, int], dist.ProcessGroupGloo] = {}
        self._stores: list[BoundedStore] = []  # those of lanes, which need them
        self._opening: dict[tuple[str, int], Lock] = {}

    def lane(self, operation: str, nbytes: int) -> Any:
        """Return the context for an operation on so many bytes. At first use every rank must call this."""
        key = (operation, nbytes)
        if key not in self._lanes:
            with self._opening.setdefault(key, Lock()):
                if key not in self._lanes:
                    self._lanes[key] = self._open(self._store.under(f"{operation}/{nbytes}"))
        return self._lanes[key]

    def _open(self, store: BoundedStore) -> dist.ProcessGroupGloo:
        _check_descriptors(self._size, len(self._lanes))
        self._stores.append(store)
        return dist.ProcessGroupGloo(store, self._rank, self._size, _options(self._timeout))


def _check_descriptors(ranks: int, lanes: int) -> None:
    """Raise CollectiveError if descriptors do not suffice for another lane: gloo would end the process."""
    limit, folder = resource.getrlimit(resource.RLIMIT_NOFILE)[0], "/proc/self/fd"
    if limit == resource.RLIM_INFINITY or not os.path.isdir(folder):
        return
    taken = len(os.listdir(folder))
    if taken + ranks + SPARE_DESCRIPTORS > limit:
        raise CollectiveError(
            f"{taken} of {limit} file descriptors are in use, and each different size of a collective needs "
            f"one for each of {ranks} ranks (this group has {lanes} sizes): raise the limit (ulimit -n), or "
            "use fewer different sizes"
        )


class GlooLanes(Collectives):
    """The default collectives, with lanes for those whose size depends on the caller's path.

    An all_to_all, even asynchronous, returns only when all ranks have reached it: they first agree on sizes.
    """

    def __init__(self) -> None:
        super().__init__("gloo")
        self._lanes: dict[dist.ProcessGroup, Lanes] = {}
        self._lanes_lock = Lock()

    def _group_spec(self) -> str:
        return _registered()

    def destroy(self) -> None:
        self._close_lanes()
        super().destroy()

    def _close_lanes(self) -> None:
        self._lanes.clear()

    def _start_all_gather(self, output: Tensor, shard: Tensor, group: Group) -> dist.Work:
        if group.size > 2 and is_small(shard.nbytes, group.size):  # of two ranks, the ring is one message
            return direct_exchange.all_gather(output, shard, group.size, self._exchange("all_gather", group))
        lane = self._lane("all_gather", output.nbytes, group)
        work: dist.Work = lane._allgather_base(as_bytes(output), as_bytes(shard))
        return work

    def _start_reduce_scatter(self, output: Tensor, full: Tensor, group: Group, op: Any) -> dist.Work:
        exchange = self._exchange("reduce_scatter", group)
        return direct_exchange.reduce_scatter(output, full, group.size, op, exchange)

    def _start_all_reduce(self, tensor: Tensor, group: Group, op: Any) -> dist.Work:
        if is_small(tensor.nbytes, group.size):
            return direct_exchange.all_reduce(tensor, group.size, op, self._exchange("all_reduce", group))
        options = dist.AllreduceOptions()
        options.reduceOp = op
        work: dist.Work = self._lane("all_reduce", tensor.nbytes, group).allreduce([tensor], options)
        return work

    def _start_all_to_all(
        self, output: Tensor, parts: Tensor, received: Sequence[int], sent: Sequence[int], group: Group
    ) -> dist.Work:
        there, here, item = output.view(torch.uint8), parts.view(torch.uint8), output.element_size()
        to, by = [n * item for n in sent], [n * item for n in received]
        self._agree(to, by, group)  # ranks send different numbers of bytes, so all sizes use one lane
        work: dist.Work = self._lane("all_to_all", 0, group).alltoall_base(there, here, by, to)
        return work

    def _start_broadcast(self, tensor: Tensor, source: int, group: Group) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        work: dist.Work = self._lane("broadcast", tensor.nbytes, group).broadcast([tensor], options)
        return work

    def _agree(self, sent: Sequence[int], received: Sequence[int], group: Group) -> None:
        """Raise, on every rank, unless each expects what the others send. Waits for all of them."""
        mine = torch.tensor([*sent, *received], device="cpu")
        every = mine.new_empty(group.size, 2, group.size)
        GlooLanes._start_all_gather(self, every.view(-1), mine, group).wait()  # on the host, in any subclass
        wrong = (every[:, 0] != every[:, 1].T).nonzero().tolist()
        if wrong:
            source, target = wrong[0]
            raise CollectiveError(
                f"all_to_all: rank {target} expects {every[target, 1, source]} bytes from rank {source}, "
                f"which sends {every[source, 0, target]}: these must be equal"
            )

    def _exchange(self, operation: str, group: Group) -> direct_exchange.Exchange:
        """An all-to-all of equal parts in the lane of `operation`."""
        return lambda received, sent: self._lane(operation, sent.nbytes, group).alltoall_base(
            received, sent, [], []
        )

    def _lane(self, operation: str, nbytes: int, group: Group) -> Any:
        process_group = group.process_group
        with self._lanes_lock:
            if not self._lanes:
                # A lane's thread that drops its last tensor during interpreter shutdown aborts the process.
                atexit.register(self._close_lanes)
            if process_group not in self._lanes:
                store = group.store.under(unused_key(group, "accelz/lanes"))
                self._lanes[process_group] = Lanes(store, group.rank, group.size, group.timeout)
            lanes = self._lanes[process_group]
        return lanes.lane(operation, nbytes)


@cache
def _registered() -> str:
    """Register gloo groups that share the process's transport thread with torch, and return their name.

    torch's own gloo groups have a thread each, which wakes a hundred times a second while the group exists.
    """
    name = "accelz_gloo"
    dist.Backend.register_backend(name, _make_group, extended_api=True, devices=["cpu"])
    return name


def share_transport() -> None:
    """Have torch's own gloo groups, too, share the process's transport thread from now on.

    For processes in which groups pile up, such as workers that run thousands of tests. It patches torch.
    """
    plain: Any = dist.ProcessGroupGloo.__init__

    def shared(
        self: Any,
        store: Any,
        rank: int,
        size: int,
        options: Any = None,
        timeout: timedelta = _TORCHS,
        **others: Any,  # torch 2.14: enable_reconfigure
    ) -> None:
        options = _options(timeout) if options is None else options
        for name, value in others.items():
            setattr(options, name, value)
        plain(self, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = shared  # type: ignore[assignment, method-assign]


def _make_group(place: Any, _: Any) -> dist.ProcessGroupGloo:
    options = _options(place.timeout)
    options.group_name, options.global_ranks_in_group = place.group_id, place.global_ranks_in_group
    return dist.ProcessGroupGloo(place.store, place.group_rank, place.group_size, options)


def _options(timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._threads, options._devices = timeout, 1, list(_devices())
    return options


@cache
def _devices() -> tuple[Any, ...]:
    """The gloo devices of all lanes and groups, which thereby share one transport thread.

    Interfaces are chosen as for torch's gloo groups.
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not names:
        return (dist.ProcessGroupGloo.create_default_device(),)
    return tuple(dist.ProcessGroupGloo.create_device(interface=name) for name in names)
