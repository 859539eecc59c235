"""The streams role. The default stream runs work at once, every other one when somebody waits for it.

So a wait that is missing shows each time, as the poison that was in the memory before, and not once in a
thousand runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from accelz.streams import Event, Stream, Streams
from accelz_sim import _C


class SimEvent(Event):
    def __init__(self, native: _C.Event) -> None:
        self.native = native

    def done(self) -> bool:
        return self.native.passed

    def synchronize(self) -> None:
        _C.synchronize_event(self.native)

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, SimEvent)
        earlier.synchronize()
        self.synchronize()
        return self.native.seconds - earlier.native.seconds


class SimStream(Stream):
    def __init__(self, number: int) -> None:
        self.number = number

    def record(self) -> Event:
        return SimEvent(_C.record(self.number))

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimEvent)
        _C.wait(self.number, event.native)


class SimStreams(Streams):
    def current(self) -> Stream:
        return SimStream(_C.current_stream(_C.current_device()))

    def new(self, priority: int = 0) -> Stream:
        return SimStream(_C.new_stream())

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, SimStream)
        device = _C.current_device()
        before = _C.exchange_stream(device, stream.number)
        try:
            yield
        finally:
            _C.exchange_stream(device, before)

    def keep_alive(self, tensor: Tensor, stream: Stream) -> None:
        assert isinstance(stream, SimStream)
        _C.keep_alive(tensor, stream.number)

    def synchronize(self) -> None:
        _C.synchronize()
