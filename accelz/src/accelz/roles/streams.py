"""The streams role. A synchronous device gets null objects, so that an engine needs only one code path."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor


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
