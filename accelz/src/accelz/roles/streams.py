"""The streams role. A synchronous device gets null objects, so that an engine needs only one code path."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from accelz.errors import BackendError


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the device has passed this point."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the device has passed this point."""

    @abstractmethod
    def seconds_since(self, earlier: Event) -> float:
        """Return the device time between two recorded events, in seconds; waits for both."""


class Stream(ABC):
    """An ordered queue of device work."""

    @abstractmethod
    def record(self) -> Event:
        """Return an event that is passed once everything queued so far is done."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Make later work on this stream start only after `event`.

        Does not block the host if this stream's work runs asynchronously.
        """


class Graph(ABC):
    """Work that was captured, to be queued as a whole as often as wanted: see `Streams.capture`."""

    @abstractmethod
    def replay(self) -> None:
        """Queue the work once more, on the current stream. It reads and writes the tensors that it was
        captured with, as they are then, wherever the program has dropped or replaced them meanwhile."""


class Streams(ABC):
    @abstractmethod
    def current(self) -> Stream:
        """Return the stream that operations are queued on now: inside `use`, the one in use."""

    @abstractmethod
    def new(self, priority: int = 0) -> Stream:
        """Create a stream. On devices with priorities, lower numbers are served first."""

    @abstractmethod
    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Queue operations on `stream` inside the with block.

        Leaving the block, also with an exception, restores the stream that was in use before.
        """

    @abstractmethod
    def keep_alive(self, tensor: Tensor, stream: Stream) -> None:
        """Do not reuse `tensor`'s memory, once freed, until the work now queued on `stream` is done."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the device has finished everything."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """Record what `run` queues on the current stream, without doing it; each replay of the graph does.

        Recorded are operations on tensors and calls of `Kernels`, with the addresses that they work on: such
        tensors must live as long as the graph is replayed. Numbers of the host, also those copied to the
        device, keep the value that they had. What `run` allocates is the graph's memory while it lives, and
        is written by each replay. `run` must not wait for the device, read values from it, draw random
        numbers, use other streams or threads (as a backward does) or capture; and it must have run once
        before, so that all that is prepared at a first use is there.

        Raises BackendError where `graph_capture` is not declared, and inside a capture; and what `run`
        raises, after which nothing is recorded any more.
        """
        raise BackendError(
            "this device captures no graphs: ask Capabilities.graph_capture before Streams.capture"
        )


class NullEvent(Event):
    """An event on a synchronous device: it has passed as soon as it is made."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, NullEvent)
        return self._time - earlier._time


class NullStream(Stream):
    def record(self) -> Event:
        return NullEvent()

    def wait(self, event: Event) -> None:
        return


class NullStreams(Streams):
    """The streams of a device that finishes each operation before it returns."""

    def __init__(self) -> None:
        self._only = NullStream()

    def current(self) -> Stream:
        return self._only

    def new(self, priority: int = 0) -> Stream:
        return self._only

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        yield

    def keep_alive(self, tensor: Tensor, stream: Stream) -> None:
        return

    def synchronize(self) -> None:
        return
