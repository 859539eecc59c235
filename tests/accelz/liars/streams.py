"""Lies of the streams role."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from accelz import (
    Event,
    Graph,
    NullStreams,
    Stream,
    Streams,
)
from accelz.roles.streams import NullEvent, NullStream
from accelz.torch_device import TorchEvent, TorchStream, TorchStreams

from .kept import keep


class NeverDone(NullEvent):
    def done(self) -> bool:
        return None  # type: ignore[return-value]


class StreamOfTheUndone(NullStream):
    def record(self) -> NeverDone:
        return NeverDone()


class EventsNeverDone(NullStreams):
    def current(self) -> Stream:
        return StreamOfTheUndone()


class KeepAliveOverwrites(NullStreams):
    def keep_alive(self, tensor: Tensor, stream: Any) -> None:
        tensor.zero_()


class NewRaises(NullStreams):
    def new(self, priority: int = 0) -> Stream:
        raise OSError("no queue left")


class EnteringRaises(NullStreams):
    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        raise OSError("not a queue of this context")
        yield


class CurrentIsNone(NullStreams):
    def current(self) -> Stream:
        return None  # type: ignore[return-value]


class MillisecondEvent(NullEvent):
    def seconds_since(self, earlier: Event) -> float:
        return super().seconds_since(earlier) * 1e3


class MillisecondStream(NullStream):
    def record(self) -> Event:
        return MillisecondEvent()


class Milliseconds(NullStreams):
    def current(self) -> Stream:
        return MillisecondStream()


class KeptAliveForever(NullStreams):
    def keep_alive(self, tensor: Tensor, stream: Any) -> None:
        keep(tensor)


class LateEvent(NullEvent):
    """Passed a while after it was made, as behind work that is still running."""

    seconds = 0.2

    def done(self) -> bool:
        return time.perf_counter() - self._time > self.seconds


class LateStream(NullStream):
    event: type[Event] = LateEvent

    def record(self) -> Event:
        return self.event()


class LateStreams(NullStreams):
    def current(self) -> Stream:
        return LateStream()


class NoticedEvent(LateEvent):
    """Passed only once another thread of the library has noticed it, though its work is done."""

    seconds = 0.001


class NoticedStream(LateStream):
    event = NoticedEvent


class EventsNoticedLate(NullStreams):
    def current(self) -> Stream:
        return NoticedStream()


class NeverPutBack(TorchStreams):
    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        super().use(stream).__enter__()
        yield


class PutBackUnlessItFails(TorchStreams):
    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        used = super().use(stream)
        used.__enter__()
        yield
        used.__exit__(None, None, None)


class CurrentIsTheFirst(TorchStreams):
    _first: Stream | None = None

    def current(self) -> Stream:
        self._first = self._first or super().current()
        return self._first


class OtherEvents(TorchStreams):
    """Streams whose events are of the class `kind`."""

    kind: type[TorchEvent]

    def current(self) -> Stream:
        return self._with_events(super().current())

    def new(self, priority: int = 0) -> Stream:
        return self._with_events(super().new(priority))

    def _with_events(self, stream: Any) -> Stream:
        made = StreamOfOtherEvents(stream.native, stream._new_event)
        made.kind = self.kind  # type: ignore[attr-defined]
        return made


class StreamOfOtherEvents(TorchStream):
    def record(self) -> Event:
        return self.kind(super().record().native)  # type: ignore[attr-defined, no-any-return]


class DoneAtOnce(TorchEvent):
    def done(self) -> bool:
        return True


class NotWaitedFor(TorchEvent):
    def synchronize(self) -> None:
        return


class DoneTooEarly(OtherEvents):
    kind = DoneAtOnce


class SynchronizedTooEarly(OtherEvents):
    kind = NotWaitedFor


class HostClock(TorchEvent):
    def __init__(self, native: Any) -> None:
        super().__init__(native)
        self.at = time.perf_counter()

    def seconds_since(self, earlier: Event) -> float:
        return self.at - earlier.at  # type: ignore[attr-defined, no-any-return]


class HostClocks(OtherEvents):
    kind = HostClock


class RecordsWhereItIsCalled(TorchStream):
    def record(self) -> Event:
        event = self._new_event(enable_timing=True)
        event.record()
        return TorchEvent(event)


class RecordingElsewhere(TorchStreams):
    def new(self, priority: int = 0) -> Stream:
        made: Any = super().new(priority)
        return RecordsWhereItIsCalled(made.native, made._new_event)


class BlockingStream(TorchStream):
    def wait(self, event: Event) -> None:
        event.synchronize()


class WaitBlocks(TorchStreams):
    def new(self, priority: int = 0) -> Stream:
        made: Any = super().new(priority)
        return BlockingStream(made.native, made._new_event)


class UnorderedStream(TorchStream):
    def wait(self, event: Event) -> None:
        return


class WaitsForNothing(TorchStreams):
    def new(self, priority: int = 0) -> Stream:
        made: Any = super().new(priority)
        return UnorderedStream(made.native, made._new_event)


class CaptureRuns(TorchStreams):
    """It does the work as well as recording it."""

    def capture(self, run: Callable[[], None]) -> Graph:
        graph = super().capture(run)
        run()
        return graph


class ErrorsAreKept(TorchStreams):
    def capture(self, run: Callable[[], None]) -> Graph:
        def quietly() -> None:
            with suppress(ZeroDivisionError):
                run()

        return super().capture(quietly)


class ReplayedOnTheFirstStream(TorchStreams):
    def capture(self, run: Callable[[], None]) -> Graph:
        return ReplayedOn(self, self.current(), super().capture(run))


class ReplayedOn(Graph):
    def __init__(self, streams: Streams, stream: Stream, graph: Graph) -> None:
        self._streams = streams
        self._stream = stream
        self._graph = graph

    def replay(self) -> None:
        with self._streams.use(self._stream):
            self._graph.replay()


class ReplaysKeepALittle(TorchStreams):
    def capture(self, run: Callable[[], None]) -> Graph:
        return KeepingGraph(super().capture(run))


class KeepingGraph(Graph):
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._kept: list[Tensor] = []

    def replay(self) -> None:
        self._kept.append(torch.zeros(100, device=torch.accelerator.current_accelerator()))
        self._graph.replay()


class HangingEvent(NullEvent):
    def synchronize(self) -> None:
        while True:
            time.sleep(0.1)


class HangingStream(NullStream):
    def record(self) -> Event:
        return HangingEvent()


class EventsHang(NullStreams):
    def current(self) -> Stream:
        return HangingStream()
