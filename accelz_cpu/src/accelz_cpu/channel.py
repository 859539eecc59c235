"""One rank's end of a group that shares memory: the native channel (csrc/channel.cpp) as an object."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import CDLL, PYFUNCTYPE, c_char_p, c_int, c_int64, c_uint64, c_void_p, py_object, pythonapi
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from accelz_cpu.native import DTYPES, last_error
from accelz_cpu.transport import Transport

SUM, MAX, MIN = range(3)
_ALL_GATHER, _BROADCAST, _REDUCE_SCATTER, _ALL_REDUCE = range(4)
_capsule = PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", pythonapi))
LINGER_SECONDS = 10.0
"""How long a leaving rank waits for the others to read what it has published."""


class Channel(Transport):
    """Collectives that publish this rank's part without waiting; their handles wait for the others' parts."""

    def __init__(self, library: CDLL, rank: int, size: int) -> None:
        self._library = library
        self._process = os.getpid()
        self._calls: list[None] = []  # one for each that is under way
        self._closing = Lock()
        self._native: int | None = library.accelz_channel_create(rank, size)
        if self._native is None:
            raise RuntimeError(last_error(library))

    def descriptor(self) -> int:
        """The descriptor of the file that the other ranks map to see this one."""
        return int(self._library.accelz_channel_descriptor(self._open()))

    def connect(self, processes: list[int], descriptors: list[int]) -> None:
        """Map the other ranks' files, given their process ids and descriptors by rank."""
        size = len(processes)
        arguments = (c_int64 * size)(*processes), (c_int * size)(*descriptors)
        self._call(self._library.accelz_channel_connect, *arguments)

    def all_gather(self, output: Tensor, shard: Tensor, timeout: float, in_place: bool = False) -> SharedWork:
        return self._start(_ALL_GATHER, output, None if in_place else shard, shard.numel(), timeout)

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> SharedWork:
        return self._start(_BROADCAST, tensor, tensor, tensor.numel(), timeout, root=root)

    def reduce_scatter(self, output: Tensor, full: Tensor, timeout: float, op: int) -> SharedWork:
        return self._start(_REDUCE_SCATTER, output, full, output.numel(), timeout, op)

    def all_reduce(self, tensor: Tensor, timeout: float, op: int) -> SharedWork:
        return self._start(_ALL_REDUCE, tensor, tensor, tensor.numel(), timeout, op)

    def all_to_all(
        self, output: Tensor, parts: Tensor, received: Sequence[int], sent: Sequence[int], timeout: float
    ) -> SharedWork:
        """received[r], sent[r]: the number of elements from rank r, and for it."""
        code, factor = _code_and_factor(output.dtype)
        counts = c_uint64 * len(sent)
        ticket = self._call(
            self._library.accelz_start_all_to_all,
            code,
            output.data_ptr(),
            counts(*(n * factor for n in received)),
            parts.data_ptr(),
            counts(*(n * factor for n in sent)),
            timeout,
            torch.get_num_threads(),
        )
        return SharedWork(self, ticket)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Memory for inputs of `reduce_scatter` that the other ranks read there; None where there is none."""
        nbytes = numel * dtype.itemsize
        lent = self._call(self._library.accelz_lend, nbytes) if nbytes else None
        return from_dlpack(_capsule(lent, b"dltensor", None)).view(dtype) if lent else None

    def finish(self, ticket: int) -> None:
        """Wait for the other ranks' parts and write the output."""
        self._call(self._library.accelz_finish, ticket, torch.get_num_threads())

    def abandon(self, ticket: int) -> None:
        """Give up a collective that nobody will finish."""
        if self._usable():
            with suppress(RuntimeError):  # the channel was closed meanwhile
                self._call(self._library.accelz_abandon, ticket)

    def fail(self, reason: str) -> None:
        """Tell the other ranks that there will be no further collective, and why."""
        self._call(self._library.accelz_channel_fail, reason.encode())

    def nbytes(self) -> int:
        return self._call(self._library.accelz_channel_bytes)

    def close(self, linger: float | None = None) -> None:
        """Wait up to `linger` seconds until the others have read everything, and free the memory.

        linger: LINGER_SECONDS by default. The memory is kept if another thread of this process is still
        waiting in a collective then.
        """
        with self._closing:
            native, self._native = self._native, None
        if native is None or os.getpid() != self._process:
            return
        linger = LINGER_SECONDS if linger is None else linger
        deadline = time.monotonic() + linger
        while self._calls and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._calls:
            self._library.accelz_channel_fail(native, b"its group was destroyed")
        else:
            self._library.accelz_channel_close(native, max(0.0, deadline - time.monotonic()))

    def _start(
        self,
        operation: int,
        output: Tensor,
        source: Tensor | None,
        count: int,
        timeout: float,
        op: int = SUM,
        root: int = 0,
    ) -> SharedWork:
        code, factor = _code_and_factor(output.dtype)
        address = None if source is None else source.data_ptr()
        ticket = self._call(
            self._library.accelz_start,
            operation,
            op,
            code,
            count * factor,
            root,
            output.data_ptr(),
            address,
            timeout,
            torch.get_num_threads(),
        )
        return SharedWork(self, ticket)

    def _call(self, function: Callable[..., int], *arguments: Any) -> int:
        """Call the library, counted, because ctypes lets other threads close the channel during the call.
        Raises RuntimeError if it fails."""
        self._calls.append(None)  # before it looks for what `close` takes away; atomic, as `pop` is
        try:
            result = function(self._open(), *arguments)
        finally:
            self._calls.pop()
        if (result or 0) < 0:  # None where it returns nothing
            raise RuntimeError(last_error(self._library))
        return result

    def _open(self) -> int:
        if self._native is None:
            raise RuntimeError("this group was destroyed")
        if os.getpid() != self._process:
            raise RuntimeError(
                "a forked process cannot use its parent's groups: it is not one of their ranks"
            )
        return self._native

    def _usable(self) -> bool:
        return self._native is not None and os.getpid() == self._process


def _code_and_factor(dtype: torch.dtype) -> tuple[int, int]:
    """The library's code for a dtype, and its elements per element: what it cannot sum is sent as bytes."""
    code = DTYPES.get(dtype)
    return (DTYPES[torch.uint8], dtype.itemsize) if code is None else (code, 1)


class SharedWork(dist.Work):
    """A collective in progress. The first `wait` writes what others sent; dropping the handle gives it up."""

    def __init__(self, channel: Channel, ticket: int) -> None:
        super().__init__()
        self._channel = channel
        self._ticket: int | None = ticket

    def wait(self, timeout: Any = None) -> bool:
        ticket = self._ticket  # another thread may be waiting too
        if ticket is not None:
            self._channel.finish(ticket)
            self._ticket = None
        return True

    def __del__(self) -> None:
        if self._ticket is not None:
            self._channel.abandon(self._ticket)
