"""Collectives of ranks on several hosts: shared memory within a host, gloo between hosts.

place  a rank's place among the ranks of its host; every host has the same number of ranks.
link   gloo between the ranks of one place, one on each host.
row    what belongs to one host: its ranks' shards, or their sum.

What no rank of the receiving host has crosses a link, and crosses it once: with H hosts, a host receives
(H - 1) / H of a gathered buffer over all its links together. Sums are computed on each host in rank order and
rounded, then over the hosts in their order and rounded again; 16-bit values are added in fp32 both times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from ctypes import CDLL
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelz.gloo import Lanes
from accelz_cpu.channel import LINGER_SECONDS, Channel
from accelz_cpu.hosts import Hosts
from accelz_cpu.native import DTYPES
from accelz_cpu.transport import Transport


class Hierarchy(Transport):
    """Runs each sequence of collectives on a thread of its own, in the order of issue.

    So a collective waits only for the same one on the other ranks, whatever the order in which handles are
    waited for, and a rank that is computing holds up no other.
    """

    def __init__(self, movements: TwoLevels, reductions: TwoLevels) -> None:
        self._levels = movements, reductions
        self._movements, self._reductions = _Sequence(movements), _Sequence(reductions)

    def all_gather(self, output: Tensor, shard: Tensor, timeout: float, in_place: bool = False) -> dist.Work:
        return self._movements.append(lambda levels: levels.all_gather(output, shard, timeout, in_place))

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> dist.Work:
        return self._movements.append(lambda levels: levels.broadcast(tensor, root, timeout))

    def reduce_scatter(self, output: Tensor, full: Tensor, timeout: float, op: int) -> dist.Work:
        return self._reductions.append(lambda levels: levels.reduce_scatter(output, full, timeout, op))

    def all_reduce(self, tensor: Tensor, timeout: float, op: int) -> dist.Work:
        return self._reductions.append(lambda levels: levels.all_reduce(tensor, timeout, op))

    def nbytes(self) -> int:
        return sum(levels.nbytes() for levels in self._levels)

    def close(self) -> None:
        """Let the collectives in progress end, for at most LINGER_SECONDS in all, and leave the group."""
        deadline = time.monotonic() + LINGER_SECONDS
        for sequence in (self._movements, self._reductions):
            sequence.close(deadline)
        for levels in self._levels:
            levels.close(deadline)


class TwoLevels:
    """One sequence of collectives over both levels. Every method blocks until its result is complete.

    channel: joins the ranks of this host, by place. links: join the ranks of this place, by host.
    """

    def __init__(self, library: CDLL, hosts: Hosts, channel: Channel, links: Lanes) -> None:
        self._library = library
        self._hosts = hosts
        self._channel = channel
        self._links: Lanes | None = links
        self._size = len(hosts.order)
        # Rows of hosts whose ranks are not consecutive have to be put together by copying.
        self._mixed = torch.tensor(hosts.order, device="cpu") if hosts.order != sorted(hosts.order) else None

    def all_gather(self, output: Tensor, shard: Tensor, timeout: float, in_place: bool = False) -> None:
        if not shard.numel():
            return
        received = shard.new_empty(len(self._hosts.ranks), shard.numel())
        if in_place:
            self._gather_links(received, shard)
            self._write_others(output, received)
            self._channel.all_gather(output, shard, timeout, in_place=True).wait()
            return
        target = output if self._mixed is None else torch.empty_like(output)
        rows = target.view(len(received), -1)
        works = [self._channel.all_gather(rows[self._hosts.index], shard, timeout)]
        self._gather_links(received, shard)
        for index, row in enumerate(rows):
            if index != self._hosts.index:
                works.append(self._channel.all_gather(row, received[index], timeout))
        for work in works:
            work.wait()
        if self._mixed is not None:
            output.view(self._size, -1)[self._mixed] = target.view(self._size, -1)

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None:
        index, place = self._hosts.locate(root)
        if place == self._hosts.place and tensor.numel():
            options = dist.BroadcastOptions()
            options.rootRank = index
            data = _as_bytes(tensor)
            self._over_links("broadcast", data, lambda lane: lane.broadcast([data], options))
        self._channel.broadcast(tensor, place, timeout).wait()

    def reduce_scatter(self, output: Tensor, full: Tensor, timeout: float, op: int) -> None:
        if not output.numel():
            return
        if self._mixed is not None:
            full = full.view(self._size, -1)[self._mixed]
        rows = full.view(len(self._hosts.ranks), -1)
        sums = output.new_empty(len(rows), output.numel())
        works = [
            self._channel.reduce_scatter(mine, row, timeout, op) for mine, row in zip(sums, rows, strict=True)
        ]
        for work in works:
            work.wait()
        received = torch.empty_like(sums)
        there, here = _as_bytes(received), _as_bytes(sums)
        self._over_links("all_to_all", here, lambda lane: lane.alltoall_base(there, here, [], []))
        self._reduce(output, received, op)

    def all_reduce(self, tensor: Tensor, timeout: float, op: int) -> None:
        each = -(-tensor.numel() // self._size)
        full = tensor.view(-1)
        if each * self._size != full.numel():
            full = torch.cat([full, full.new_zeros(each * self._size - full.numel())])
        shard = full.new_empty(each)
        self.reduce_scatter(shard, full, timeout, op)
        self.all_gather(full, shard, timeout)
        if full.data_ptr() != tensor.data_ptr():
            tensor.copy_(full[: tensor.numel()].view_as(tensor))

    def describe(self) -> str:
        """Say which of the group's ranks the channel's ranks are."""
        here = ", ".join(map(str, self._hosts.here))
        return f"ranks 0 to {len(self._hosts.here) - 1} of this host are ranks {here} of the group"

    def nbytes(self) -> int:
        return self._channel.nbytes()

    def close(self, deadline: float) -> None:
        self._links = None
        self._channel.close(max(0.0, deadline - time.monotonic()))

    def _gather_links(self, received: Tensor, shard: Tensor) -> None:
        whole, mine = _as_bytes(received), _as_bytes(shard)
        self._over_links("all_gather", whole, lambda lane: lane._allgather_base(whole, mine))

    def _write_others(self, output: Tensor, received: Tensor) -> None:
        """Write the shards of other hosts into the memory that this host's ranks have in common.

        They may be reading it meanwhile: if values have changed, all ranks had stopped reading before.
        """
        shards = output.view(self._size, -1)
        for index, ranks in enumerate(self._hosts.ranks):
            if index != self._hosts.index:
                shards[ranks[self._hosts.place]].copy_(received[index])

    def _reduce(self, output: Tensor, rows: Tensor, op: int) -> None:
        self._library.accelz_reduce(
            output.data_ptr(),
            rows.data_ptr(),
            len(rows),
            DTYPES[rows.dtype],
            op,
            output.numel(),
            torch.get_num_threads(),
        )

    def _over_links(self, operation: str, whole: Tensor, start: Callable[[Any], dist.Work]) -> None:
        """Run one collective between hosts. If it fails, tell the ranks of this host."""
        try:
            if self._links is None:
                raise RuntimeError("this group was destroyed")
            start(self._links.lane(operation, whole.nbytes)).wait()
        except RuntimeError as error:
            reason = f"{operation} between the hosts failed: {error}"
            self._channel.fail(reason)
            raise RuntimeError(reason) from error


class _Sequence:
    """A thread that runs collectives one after another. After a failure it runs no more.

    The thread is a daemon, because at exit the interpreter joins other threads before anything can be closed:
    a rank that has raised would wait for ranks that never come.
    """

    def __init__(self, levels: TwoLevels) -> None:
        self._levels = levels
        self._process = os.getpid()
        self._failure = ""
        self._queue: SimpleQueue[tuple[Future[None], Callable[[TwoLevels], None]] | None] = SimpleQueue()
        self._closed = False
        self._lock = Lock()  # so that nothing is queued after the end marker
        self._thread = Thread(target=self._serve, name="accelz", daemon=True)
        self._thread.start()

    def append(self, collective: Callable[[TwoLevels], None]) -> dist.Work:
        if os.getpid() != self._process:
            raise RuntimeError(
                "a forked process cannot use its parent's groups: it is not one of their ranks"
            )
        future: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("this group was destroyed")
            self._queue.put((future, collective))
        return QueuedWork(future)

    def close(self, deadline: float) -> None:
        """Let the collective in progress end, until `deadline` at most, and start no other."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            self._cancel_all()
            self._queue.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _cancel_all(self) -> None:
        with suppress(Empty):
            while item := self._queue.get_nowait():
                item[0].cancel()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            future, collective = item
            try:
                self._run(collective)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del item, future, collective  # and with them the buffers

    def _run(self, collective: Callable[[TwoLevels], None]) -> None:
        if self._failure:
            raise RuntimeError(
                f"no collective is possible after an earlier failure; start a new job: {self._failure}"
            )
        try:
            collective(self._levels)
        except RuntimeError as error:
            self._failure = f"{error} ({self._levels.describe()})"
            raise RuntimeError(self._failure) from error


class QueuedWork(dist.Work):
    """A collective that a sequence runs, whether or not it is waited for."""

    def __init__(self, future: Future[None]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        try:
            self._future.result()
        except CancelledError as error:
            raise RuntimeError("this group was destroyed before the collective began") from error
        return True


def _as_bytes(tensor: Tensor) -> Tensor:
    """View as bytes what gloo only has to move: it does not know every dtype."""
    return tensor.view(-1).view(torch.uint8)
