"""The collectives role: process groups, and collectives on flat buffers over torch.distributed.

The default implementation works for every device whose communication library is registered with
torch.distributed; a backend overrides only what differs. A group also takes host tensors (over gloo), so
an engine can exchange small control data without touching the device.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from accelz.errors import CollectiveError
from accelz.ranks.bounded_store import SPARE, bounded, default_store, limited
from accelz.ranks.exchange import Exchange
from accelz.ranks.group import Group
from accelz.ranks.launch_environment import place_of_this_process
from accelz.roles import direct_exchange

T = TypeVar("T")
ReduceOp = Literal["sum", "max", "min"]
_joined: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""The process that has joined by a group: forked children inherit the group, but are no ranks of it."""
_FORKED = (
    "this process was forked by one that has joined a job, such as a notebook's kernel with an engine, and "
    "would take itself for that rank: start the ranks by torchrun, or restart the kernel and launch them "
    "before it makes an engine of its own"
)
_OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 renames these two and deprecates the old names; 2.11 has only the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle(ABC):
    """A collective in progress."""

    @abstractmethod
    def wait(self) -> None:
        """Make the current stream (on a synchronous device: the host) wait for the collective.

        May be called repeatedly and from several threads; each call waits for the collective. Raises
        CollectiveError if the collective failed or timed out.
        """


class _Work(Handle):
    def __init__(self, work: dist.Work, keep: tuple[Tensor, ...]) -> None:
        self._work = work
        self._keep = keep  # the buffers must outlive the transfer even if the caller drops them

    def wait(self) -> None:
        _translated(self._work.wait)
        self._keep = ()


class _Done(Handle):
    def wait(self) -> None:
        return


DONE: Handle = _Done()
"""The handle of a collective that was complete when its call returned."""


class Collectives:
    """Collectives of one device type.

    A collective runs after the work already queued on the current stream, whichever stream that is. It writes
    to its output only: the inputs of all_gather, reduce_scatter and all_to_all are left unchanged.

    spec: the torch.distributed backend for each device type, e.g. "cpu:gloo" or "cpu:gloo,cuda:nccl".
    member_groups: whether a group can be made by its members alone.
    """

    def __init__(self, spec: str = "cpu:gloo", member_groups: bool = True) -> None:
        self.spec = spec
        self.member_groups = member_groups

    def init(
        self,
        timeout: float,
        rank: int | None = None,
        world_size: int | None = None,
        store: dist.Store | None = None,
    ) -> Group:
        """Join the job and return the group of all its ranks.

        With a store, rank and world_size give this process's place in the job. Without one, the environment
        variables set by torchrun are used; if they are missing too, the process is a job of one rank. A
        default process group that is already initialised is used as it is. timeout in seconds.

        Raises CollectiveError if the environment contradicts itself or shows that another launcher started
        several processes, if the ranks do not meet, and in a process forked by one that has joined a job.
        """
        if not dist.is_initialized():
            limit = timedelta(seconds=timeout)
            place = (
                _translated(place_of_this_process, timeout)
                if store is None
                else {"rank": rank, "world_size": world_size, "store": store}
            )
            _translated(self._init_process_group, limit, place)
        world = dist.group.WORLD
        assert world is not None
        if _joined.setdefault(world, os.getpid()) != os.getpid():
            raise CollectiveError(_FORKED)
        return Group.of(world, timeout)

    def _init_process_group(self, limit: timedelta, place: dict[str, Any]) -> None:
        try:
            _by_store(lambda: dist.init_process_group(self.spec, timeout=limit, **place), limit, _host(place))
        except (AssertionError, AttributeError) as error:  # raised by torch for a library it does not know
            raise CollectiveError(
                f"torch.distributed cannot use {self.spec!r}: {error}. Register the device's communication "
                "library with torch.distributed.Backend.register_backend first"
            ) from error

    def new_group(
        self, ranks: Sequence[int] | None, timeout: float, members_only: bool = False
    ) -> Group | None:
        """Create another group of the job's `ranks` (None: all). Every rank of the job must call this.

        Returns None on ranks that are not members. timeout in seconds. members_only: the group's ranks call
        this, and no others need to; raises CollectiveError without `member_groups`.
        """
        if members_only and not self.member_groups:
            raise CollectiveError(
                f"the library of {self.spec!r} makes groups only where every rank of the job makes them: use "
                "all ranks of the job, or start a job for each group"
            )
        members = None if ranks is None else list(ranks)
        if members is not None and members_only:
            _translated(_even_out_groups, members, timeout)
        made = _translated(self._make_group, members, timedelta(seconds=timeout), members_only)
        return None if made is dist.GroupMember.NON_GROUP_MEMBER else Group.of(made, timeout)

    def _make_group(self, ranks: list[int] | None, timeout: timedelta, members_only: bool) -> Any:
        """Make one of torch's groups."""
        local: dict[str, Any] = {"use_local_synchronization": True} if members_only else {}
        spec = self._group_spec()
        host = default_store(timeout.total_seconds()).where
        return _by_store(lambda: dist.new_group(ranks, timeout=timeout, backend=spec, **local), timeout, host)

    def connect(self, group: Group, device: torch.device) -> None:
        """Have the ranks of a group connect for tensors on `device`; all of them must call this.

        Libraries connect in a group's first collective. One that has no time limit there is to be given one
        here. Raises CollectiveError, or HostSilentError where the job's store does not answer.
        """
        self.all_reduce(torch.zeros(1, device=device), group)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, group: Group) -> Tensor:
        """Return an uninitialised tensor, (numel,), to be filled and passed to the group's `reduce_scatter`.

        With the capability `communication_buffers` the library reads it in place, without copying it before:
        it is memory that ranks share, or that is registered with the network. Once a reduce_scatter of it,
        or of a part, has begun, it must not be written to again, not even after `wait`: other ranks may still
        be reading. Drop it and ask for another; memory is given out again when all have read it.

        A rank asks when it likes, once the group is connected: not all ranks have to, nor in one order.
        Where a group has no such memory (on several hosts, say), the tensor is an ordinary one, as by
        default. A forked child may have no access to it. Raises torch.OutOfMemoryError.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(self, output: Tensor, shard: Tensor, group: Group, async_op: bool = False) -> Handle:
        """Concatenate every rank's `shard` (n elements) into `output` (n × size elements), in rank order.

        `shard` may be this rank's slice of `output`; nothing is then copied locally.
        """
        _check_sizes("all_gather", output, shard, group)
        _check_there(output, shard)
        return _handle(async_op, (output, shard), self._start_all_gather, output, shard, group)

    def reduce_scatter(
        self, output: Tensor, full: Tensor, group: Group, op: ReduceOp = "sum", async_op: bool = False
    ) -> Handle:
        """Reduce `full` (n × size elements) over all ranks and leave this rank's n elements in `output`."""
        _check_sizes("reduce_scatter", full, output, group)
        _check_there(output, full)
        return _handle(async_op, (output, full), self._start_reduce_scatter, output, full, group, _OPS[op])

    def all_to_all(
        self,
        output: Tensor,
        parts: Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        group: Group,
        async_op: bool = False,
    ) -> Handle:
        """Send each rank its part of `parts`, and receive the other ranks' parts in `output`, in rank order.

        received[r], sent[r]: the number of elements that rank r sends to this rank, and this rank to rank r;
        0 is allowed. Even with `async_op`, it may return only when all ranks have made the call, in backends
        where they first have to agree on sizes.
        """
        _check_counts(output, received, "received", group)
        _check_counts(parts, sent, "sent", group)
        _check_dtypes(output, parts)
        _check_own_part(received[group.rank], sent[group.rank])
        _check_there(output, parts)
        start = self._start_all_to_all
        return _handle(async_op, (output, parts), start, output, parts, received, sent, group)

    def all_reduce(
        self, tensor: Tensor, group: Group, op: ReduceOp = "sum", async_op: bool = False
    ) -> Handle:
        """Reduce `tensor` over all ranks, in place. A host tensor travels over gloo."""
        _check_there(tensor)
        return _handle(async_op, (tensor,), self._start_all_reduce, tensor, group, _OPS[op])

    def broadcast(self, tensor: Tensor, source: int, group: Group, async_op: bool = False) -> Handle:
        """Copy `tensor` from the group's rank `source` to all its ranks, in place."""
        _check_there(tensor)
        return _handle(async_op, (tensor,), self._start_broadcast, tensor, source, group)

    def check(self, group: Group) -> None:
        """Raise CollectiveError if a collective of the group has failed without any call reporting it.

        Where a library runs asynchronously to the host, `wait` only orders streams and may return long before
        the collective is over. Called after `streams.synchronize()`, this method knows of every collective
        issued before. The default does nothing, for libraries whose `wait` raises.
        """

    def barrier(self, group: Group) -> None:
        """Return once every rank of the group has called this."""
        token = torch.zeros(1, device="cpu")  # the same on every device, and it blocks the host
        self.all_reduce(token, group)

    def destroy(self) -> None:
        """Leave the job: destroy every process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _group_spec(self) -> str:
        """The torch.distributed backend of the groups that `new_group` makes."""
        return self.spec

    # What a backend overrides: each method starts one collective and returns a torch.distributed.Work, whose
    # wait() does what Handle.wait promises. Sizes have been checked, and the buffers are kept until then.
    # op: a torch.distributed.ReduceOp, SUM, MAX or MIN. A tensor may be a host tensor as well.

    def _start_all_gather(self, output: Tensor, shard: Tensor, group: Group) -> dist.Work:
        """Start gathering every rank's `shard` in `output`; `shard` may be this rank's slice of it."""
        return cast(dist.Work, _all_gather(output, shard, group=group.process_group, async_op=True))

    def _start_reduce_scatter(self, output: Tensor, full: Tensor, group: Group, op: Any) -> dist.Work:
        """Start reducing `full`, this rank's slice into `output`. op: dist.ReduceOp.SUM, MAX or MIN."""
        return cast(dist.Work, _reduce_scatter(output, full, op, group=group.process_group, async_op=True))

    def _start_all_to_all(
        self, output: Tensor, parts: Tensor, received: Sequence[int], sent: Sequence[int], group: Group
    ) -> dist.Work:
        """Start sending each rank its part of `parts`. received, sent: elements by rank, as in all_to_all."""
        work = dist.all_to_all_single(
            output, parts, list(received), list(sent), group.process_group, async_op=True
        )
        return cast(dist.Work, work)

    def _start_all_reduce(self, tensor: Tensor, group: Group, op: Any) -> dist.Work:
        """Start reducing `tensor` in place. op: dist.ReduceOp.SUM, MAX or MIN."""
        if tensor.device.type == "cpu" and direct_exchange.is_small(tensor.nbytes, group.size):
            exchange = partial(dist.all_to_all_single, group=group.process_group, async_op=True)
            return direct_exchange.all_reduce(tensor, group.size, op, exchange)
        return cast(dist.Work, dist.all_reduce(tensor, op, group=group.process_group, async_op=True))

    def _start_broadcast(self, tensor: Tensor, source: int, group: Group) -> dist.Work:
        """Start copying `tensor` from rank `source` of the group to all its ranks, in place."""
        work = dist.broadcast(tensor, group=group.process_group, group_src=source, async_op=True)
        return cast(dist.Work, work)


def _by_store(call: Callable[[], T], timeout: timedelta, host: str) -> T:
    """Return `call()`, in which torch itself calls the job's store and has no limit if its host is silent."""
    return limited(call, timeout.total_seconds() + SPARE, "making a group of ranks", host)


def _host(place: dict[str, Any]) -> str:
    """Where the store is that a place comes with, or that torch makes."""
    if "store" in place:
        return bounded(place["store"], 1.0).where
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


_meetings: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Exchange]] = WeakKeyDictionary()
"""Where the members of groups to be made meet, by the default group and the members."""


def _even_out_groups(members: list[int], timeout: float) -> None:
    """Bring the ranks of a new group to equally many groups.

    Where members alone make a group, torch derives its name from their number (from 2.14 on, from that of all
    names ever given): ranks with other numbers would not meet, and a name may be taken if groups were
    destroyed. Ranks then get some of themselves alone.
    """
    world, rank = dist.group.WORLD, dist.get_rank()
    assert world is not None
    if world.bound_device_id is not None and len(members) < world.size():
        raise CollectiveError(
            "the default group is bound to a device, so that its library makes groups only where every rank "
            "of the job does: call init_process_group without device_id"
        )
    meetings = _meetings.setdefault(world, {})
    if tuple(members) not in meetings:
        among = Group(members.index(rank), len(members), timeout, default_store(timeout), world)
        meetings[tuple(members)] = Exchange(among, f"accelz/groups of {members}")
    while True:
        names = dist.distributed_c10d._world.pg_names.values()
        taken = dist.distributed_c10d._process_group_name(members, use_hashed_name=True) in names
        ever = dist.distributed_c10d._world.group_count  # after `taken`, which gives a name
        number = ever if torch.__version__ >= "2.14" else len(names)
        counts, conflicts = zip(*meetings[tuple(members)]([number, taken], timeout), strict=True)
        wanted = max(counts) + any(conflicts)
        if min(counts) == wanted:
            return
        for _ in range(wanted - number):
            dist.new_group([rank], backend="gloo", use_local_synchronization=True)


def _handle(
    async_op: bool, keep: tuple[Tensor, ...], start: Callable[..., dist.Work], *arguments: Any
) -> Handle:
    handle = _Work(_translated(start, *arguments), keep)
    if async_op:
        return handle
    handle.wait()
    return DONE


def _check_sizes(name: str, full: Tensor, shard: Tensor, group: Group) -> None:
    if full.numel() != shard.numel() * group.size or full.dtype != shard.dtype:
        raise CollectiveError(
            f"{name}: the full buffer has {full.numel()} elements of {full.dtype} and the shard "
            f"{shard.numel()} of {shard.dtype}; with {group.size} ranks the full buffer must have exactly "
            f"{shard.numel() * group.size} elements of the shard's dtype"
        )


def _check_there(*tensors: Tensor) -> None:
    for tensor in tensors:
        end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        if tensor.untyped_storage().nbytes() < end and tensor.numel():
            raise CollectiveError(
                f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} has no memory: its storage was "
                "released; materialize it first"
            )


def _check_counts(buffer: Tensor, counts: Sequence[int], what: str, group: Group) -> None:
    fits = len(counts) == group.size and min(counts) >= 0 and sum(counts) == buffer.numel()
    if not fits:
        raise CollectiveError(
            f"all_to_all: {what} must be a number of elements, at least 0, for each of {group.size} ranks, "
            f"adding up to the buffer's {buffer.numel()}; got {list(counts)}"
        )


def _check_own_part(received: int, sent: int) -> None:
    if received != sent:
        raise CollectiveError(
            f"all_to_all: this rank sends itself {sent} elements but expects {received}: make the two "
            "numbers equal"
        )


def _check_dtypes(output: Tensor, parts: Tensor) -> None:
    if output.dtype != parts.dtype:
        raise CollectiveError(
            f"all_to_all: the output is {output.dtype} but what is sent is {parts.dtype}: use the same dtype"
        )


def _translated(call: Callable[..., T], *arguments: Any) -> T:
    try:
        return call(*arguments)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        if isinstance(error, CollectiveError):
            raise
        raise CollectiveError(str(error)) from error
