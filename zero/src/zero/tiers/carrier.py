"""Move values between the device and the host concurrently with the computation."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from accelz import Accelerator, Event, Stream, Streams
from zero.observe.transfers import Transfers
from zero.ranges import in_range

SLOTS = 2  # host buffers that weights leave from: one fills while the other travels
LEAVING = 2  # values that may be on their way to the host, still holding device memory


@dataclass
class HostCopy:
    """Values on their way to the host."""

    values: Tensor
    event: Event

    def wait(self) -> Tensor:
        """Return the values once they have arrived; blocks the host until then."""
        self.event.synchronize()
        return self.values


class SideStreamWork:
    """Work that was queued to run concurrently with the computation."""

    event: Event

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def wait(self) -> None:
        """Order what follows after this work."""
        self._streams.current().wait(self.event)


class Carrier:
    """Runs copies on side streams.

    One stream serves both directions, in the order of issue; another one serves what only the device waits
    for. moved: where to count bytes, "to host" and "to device". transfers: where to time copies.
    """

    def __init__(
        self, accelerator: Accelerator, moved: Counter[str] | None = None, transfers: Transfers | None = None
    ) -> None:
        self._transfers = Transfers(accelerator) if transfers is None else transfers
        self._moved = Counter[str]() if moved is None else moved
        self._accelerator = accelerator
        self._streams = accelerator.streams
        self._stream = accelerator.streams.new()
        self._flying: deque[Event] = deque()
        self._slots: list[tuple[Tensor | None, Event | None]] = [(None, None)] * SLOTS

    @cached_property
    def _beside(self) -> Stream:
        return self._streams.new()

    @in_range("copy", "to host")
    def to_host(self, values: Tensor) -> HostCopy:
        """Begin to move `values` to page-locked host memory.

        The caller drops `values` at once; the device has its memory back when the copy is complete.
        """
        self._moved["to host"] += values.nbytes
        host = self._accelerator.memory.empty_host(tuple(values.shape), values.dtype)
        self._stream.wait(self._streams.current().record())
        with self._streams.use(self._stream):
            self._copy(host, values, "to host")
        self._streams.keep_alive(values, self._stream)
        host_copy = HostCopy(host, self._stream.record())
        self._flying.append(host_copy.event)
        if len(self._flying) > LEAVING:
            self._flying.popleft().synchronize()
        return host_copy

    def slot(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a host buffer, (numel,), to fill and pass to `to_device`; waits for its last copy to end."""
        buffer, travelling = self._slots.pop(0)
        if travelling is not None:
            travelling.synchronize()
        nbytes = numel * dtype.itemsize
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._accelerator.memory.empty_host((nbytes,), torch.uint8)
        self._slots.append((buffer, None))
        return buffer[:nbytes].view(dtype)

    def to_device(self, slot: Tensor, out: Tensor) -> None:
        """Begin to copy the buffer that `slot` returned last to `out` on the device. See `join`."""
        buffer, _ = self._slots[-1]
        self._slots[-1] = (buffer, self.send(slot, out))

    @in_range("copy", "to device")
    def send(self, values: Tensor, out: Tensor) -> Event:
        """Begin to copy between page-locked memory and the device. `values` must not change until the event.

        Copies that `to_host` begins later land later. See `join`.
        """
        where = "to host" if values.device == self._accelerator.device else "to device"
        self._moved[where] += values.nbytes
        self._stream.wait(self._streams.current().record())
        with self._streams.use(self._stream):
            self._copy(out, values, where)
        return self._stream.record()

    def _copy(self, out: Tensor, values: Tensor, where: str) -> None:
        timed = self._transfers.begin(where, values.nbytes)
        out.copy_(values, non_blocking=True)
        self._transfers.mark(timed)

    @contextmanager
    def beside(self) -> Iterator[SideStreamWork]:
        """Queue the block's work beside the computation.

        It runs after what was queued before; later work waits for it only where it waits for the returned
        work. Allocate outside of the block: memory belongs to the stream that was current when it was
        allocated.
        """
        work, computing = SideStreamWork(self._streams), self._streams.current()
        self._beside.wait(computing.record())
        with self._streams.use(self._beside):
            try:
                yield work
            except BaseException:
                computing.wait(self._beside.record())  # nobody will wait for the work
                raise
            work.event = self._beside.record()

    def join(self) -> None:
        """Make the device's later work wait for everything that is under way to it."""
        self._streams.current().wait(self._stream.record())
