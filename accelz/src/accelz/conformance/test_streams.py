"""The streams role: null objects on a synchronous device, real order between queues elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from accelz.accelerator import Accelerator
from accelz.conformance.contract import expect, expect_close, named
from accelz.conformance.marks import about, needs, proves
from accelz.conformance.work import long_work
from accelz.roles.streams import Event, Stream

LONG_SECONDS = 0.3
ROUNDS = 5


class StreamsContract:
    """The interface holds on every device; order between streams where `streams` is declared."""

    @about("Streams.current", "Stream.record", "Event.done", "Event.synchronize", "Stream.wait")
    def test_the_interface_holds_everywhere(self, accelerator: Accelerator) -> None:
        """Streams and events can be created, waited for and queried on any device."""
        streams = accelerator.streams
        current = streams.current()
        event = current.record()
        for stream in (current, streams.new(), streams.new(priority=-1)):
            stream.wait(event)
        event.synchronize()
        expect(event.done() is True, "Event.done", "must be True after synchronize()", repr(event.done()))
        streams.synchronize()

    @about("Streams.use")
    def test_work_inside_use_is_done_right(self, accelerator: Accelerator) -> None:
        """Work queued inside `use` is done correctly, also after an exception has left it."""
        streams = accelerator.streams
        side = streams.new()
        with pytest.raises(ZeroDivisionError), streams.use(side):
            raise ZeroDivisionError
        with streams.use(side):
            inside = torch.arange(100.0, device=accelerator.device) * 2
            event = side.record()
        streams.current().wait(event)
        expected = "work inside must give the right result"
        expect_close(inside + 1, torch.arange(100.0) * 2 + 1, "Streams.use", expected)

    @about("Streams.keep_alive")
    def test_keep_alive_is_harmless(self, accelerator: Accelerator) -> None:
        """keep_alive() does not change the tensor."""
        values = torch.arange(100.0, device=accelerator.device)
        accelerator.streams.keep_alive(values, accelerator.streams.new())
        expect_close(values, torch.arange(100.0), "Streams.keep_alive", "must not change the tensor")

    @about("Event.seconds_since")
    def test_events_measure_time(self, accelerator: Accelerator) -> None:
        """The time between two events is that of the device's work between them, in seconds."""
        for _ in range(ROUNDS):
            seconds, limit = _timed_long_work(accelerator)
            expected = f"must be between 0 and {limit} s, which passed on the host"
            expect(0 < seconds <= limit * 1.1 + 0.01, "Event.seconds_since", expected, f"{seconds} s")
            if seconds > limit / 3:
                return  # on a busy host the device's share of the time may be small, but not in every round
        expected = f"must be most of the {limit} s that the work between the events took, in seconds"
        expect(False, "Event.seconds_since", expected, f"{seconds} s, and as little {ROUNDS} times")

    @about("Streams.synchronize")
    def test_synchronize_waits_for_everything(self, accelerator: Accelerator) -> None:
        """After synchronize() every event recorded before is done, whatever its stream."""
        event = _event_behind_long_work(accelerator, accelerator.streams.new())
        accelerator.streams.synchronize()
        expect(event.done(), "Streams.synchronize", "must wait for all streams", "an event is still pending")

    @about("Capabilities.asynchronous", "Event.done")
    @proves("asynchronous")
    def test_operations_return_before_they_are_done(self, accelerator: Accelerator) -> None:
        """On an asynchronous device, operations return before the work they queued is finished.

        On another, an event may still take a moment, but no part of the work's time.
        """
        long_work(accelerator, 0.0)  # whatever a first use costs
        accelerator.streams.synchronize()
        started = time.perf_counter()
        long_work(accelerator, LONG_SECONDS)
        event = accelerator.streams.current().record()
        pending = _pending_for(event, (time.perf_counter() - started) / 20)
        accelerator.streams.synchronize()
        do = (
            "let done() ask the device, or declare asynchronous=False if operations on the default stream "
            "are done when they return"
        )
        expect(pending, "Event.done", "must be False right after queueing long work", "already done", do)

    @about("Event.done")
    @needs("streams")
    def test_an_event_is_not_done_before_its_work(self, accelerator: Accelerator) -> None:
        """An event on a side stream is not done while the work before it is running."""
        event = _event_behind_long_work(accelerator, accelerator.streams.new())
        pending = _still_pending(accelerator, event)
        expect(pending, "Event.done", "must be False while the work before it runs", "True")

    @about("Event.synchronize")
    @needs("streams")
    def test_an_event_is_waited_for(self, accelerator: Accelerator) -> None:
        """synchronize() blocks the host until the work before the event is done, on any stream."""
        event = _event_behind_long_work(accelerator, accelerator.streams.new())
        event.synchronize()
        done = event.done()
        accelerator.streams.synchronize()
        expect(done, "Event.synchronize", "must return after the device has passed the event", "too early")

    @about("Stream.record")
    @needs("streams")
    def test_a_stream_that_is_not_in_use_records(self, accelerator: Accelerator) -> None:
        """An event is behind the work of the stream that records it, whichever stream is in use."""
        side = accelerator.streams.new()
        with accelerator.streams.use(side):
            long_work(accelerator, LONG_SECONDS / 3)
        pending = _still_pending(accelerator, side.record())
        came = "the event of a busy stream, recorded outside `use`, was done at once"
        expect(pending, "Stream.record", "must come after this stream's work, not the current stream's", came)

    @about("Streams.current")
    @needs("streams")
    def test_current_is_the_stream_in_use(self, accelerator: Accelerator) -> None:
        """Inside `use`, an event of current() is behind the work queued there."""
        streams = accelerator.streams
        with streams.use(streams.new()):
            long_work(accelerator, LONG_SECONDS / 3)
            event = streams.current().record()
        pending = _still_pending(accelerator, event)
        came = "its event came before the work queued there"
        expect(pending, "Streams.current", "must be the stream in use, inside `use`", came)

    @about("Streams.use")
    @needs("streams")
    @pytest.mark.parametrize("inside", [False, True], ids=["from the first stream", "from another use"])
    @pytest.mark.parametrize("raises", [False, True], ids=["left", "left with an error"])
    def test_use_puts_the_stream_back(self, accelerator: Accelerator, inside: bool, raises: bool) -> None:
        """After `use`, however it was left, operations are queued on the stream that was in use before."""
        streams = accelerator.streams
        side = streams.new()
        with streams.use(streams.new()) if inside else contextlib.nullcontext():
            torch.ones(1, device=accelerator.device).item()  # whatever a first use costs
            with contextlib.suppress(ZeroDivisionError), streams.use(side):
                long_work(accelerator, LONG_SECONDS / 3)
                slow = side.record()
                if raises:
                    raise ZeroDivisionError
            torch.ones(1, device=accelerator.device).item()
            overtook = _still_pending(accelerator, slow)
        came = "an operation after it waited for the stream that was left"
        expect(overtook, "Streams.use", "must restore the previous stream", came)

    @about("Streams.new", "Streams.use", "Event.done")
    @proves("streams")
    def test_streams_are_several_queues(self, accelerator: Accelerator) -> None:
        """Short work on one stream finishes while long work on another one is still running."""
        streams = accelerator.streams
        busy, free = streams.new(), streams.new()
        with streams.use(free):
            torch.ones(1, device=accelerator.device)  # whatever a first use costs
        streams.synchronize()
        slow = _event_behind_long_work(accelerator, busy, LONG_SECONDS)
        with streams.use(free):
            torch.ones(1, device=accelerator.device)
            quick = free.record()
        quick.synchronize()
        overtook = _still_pending(accelerator, slow)
        expected = "must return a separate queue"
        expect(overtook, "Streams.new", expected, "a second stream waited for the first")

    @about("Stream.wait", "Stream.record")
    @needs("streams")
    def test_an_event_orders_two_streams(self, accelerator: Accelerator) -> None:
        """Work after wait(event) sees everything that was queued before the event."""
        streams = accelerator.streams
        producer, consumer = streams.new(), streams.new()
        for round_ in range(ROUNDS):
            values = torch.zeros(1 << 16, device=accelerator.device)
            streams.synchronize()
            with streams.use(producer):
                long_work(accelerator, LONG_SECONDS / ROUNDS)
                values.fill_(float(round_ + 1))
                ready = producer.record()
            consumer.wait(ready)
            with streams.use(consumer):
                seen = values.clone()
                done = consumer.record()
            done.synchronize()
            want = torch.full((1 << 16,), float(round_ + 1))
            expect_close(seen, want, "Stream.wait", "later work must come after the event")

    @about("Stream.wait")
    @needs("streams")
    def test_wait_does_not_block_the_host(self, accelerator: Accelerator) -> None:
        """wait(event) returns while the work before the event is still running."""
        streams = accelerator.streams
        event = _event_behind_long_work(accelerator, streams.new())
        streams.new().wait(event)
        pending = _still_pending(accelerator, event)
        expect(pending, "Stream.wait", "must not block the host", "the event was done when it returned")

    @about("Memory.empty_host")
    @needs("pinned_host_memory", "streams")
    @pytest.mark.parametrize("back", [False, True], ids=["to the device", "to the host"])
    def test_copies_of_page_locked_memory_do_not_block(self, accelerator: Accelerator, back: bool) -> None:
        """A copy with non_blocking=True waits in its stream's queue and does not block the host."""
        streams, side = accelerator.streams, accelerator.streams.new()
        host = accelerator.memory.empty_host((1 << 20,), torch.float32).fill_(1.0)
        values = torch.full((1 << 20,), 2.0, device=accelerator.device)
        source, target = (values, host) if back else (host, values)
        streams.synchronize()
        with streams.use(side):
            long_work(accelerator, LONG_SECONDS / 3)
            target.copy_(source, non_blocking=True)
            event = side.record()
        pending = _still_pending(accelerator, event)
        came = "the host waited for it, as for pageable memory"
        expect(pending, "Memory.empty_host", "must be page-locked: a copy must not block the host", came)
        want = torch.full((1 << 20,), 2.0 if back else 1.0)
        expect_close(target, want, "Memory.empty_host", "the copy must carry the values")

    @about("Streams.keep_alive")
    @needs("streams")
    def test_keep_alive_protects_freed_memory(self, accelerator: Accelerator) -> None:
        """Memory freed while another stream still has to read it is not reused before that."""
        _part_with_what_is_read(accelerator, lambda values: None)

    @about("Streams.keep_alive")
    @needs("streams", "storage_resize")
    def test_keep_alive_protects_bytes_that_a_resize_drops(self, accelerator: Accelerator) -> None:
        """Bytes that a resize drops while another stream has to read them are not reused before that."""

        def drop(values: Tensor) -> None:
            with named("Capabilities.storage_resize", "untyped_storage().resize_ must work"):
                values.untyped_storage().resize_(0)

        _part_with_what_is_read(accelerator, drop)


def _timed_long_work(accelerator: Accelerator) -> tuple[float, float]:
    """Return the seconds that some work on a side stream takes, by its events and by the host's clock."""
    streams, side = accelerator.streams, accelerator.streams.new()
    with streams.use(side):
        long_work(accelerator, 0.0)  # whatever a first use costs
        streams.synchronize()
        started = time.perf_counter()
        earlier = streams.current().record()
        long_work(accelerator, LONG_SECONDS / 3)
        later = streams.current().record()
    later.synchronize()
    limit = time.perf_counter() - started
    return later.seconds_since(earlier), limit


def _event_behind_long_work(
    accelerator: Accelerator, stream: Stream, seconds: float = LONG_SECONDS / 3
) -> Event:
    with accelerator.streams.use(stream):
        long_work(accelerator, seconds)
        return stream.record()


def _pending_for(event: Event, seconds: float) -> bool:
    """Whether an event is not done for so long."""
    end = time.perf_counter() + seconds
    while not event.done():
        if time.perf_counter() > end:
            return True
    return False


def _still_pending(accelerator: Accelerator, event: Event) -> bool:
    """Whether the work before an event is not done yet; then wait for it and all other work."""
    pending = not event.done()
    accelerator.streams.synchronize()
    return pending


def _part_with_what_is_read(accelerator: Accelerator, drop: Callable[[Tensor], object]) -> None:
    """Give up a tensor that another stream still has to read: `drop` its memory, then its last reference."""
    streams = accelerator.streams
    side = streams.new()
    for round_ in range(ROUNDS):
        values = torch.full((1 << 20,), float(round_), device=accelerator.device)
        side.wait(streams.current().record())
        with streams.use(side):
            long_work(accelerator, LONG_SECONDS / ROUNDS)
            seen = values.clone()
            done = side.record()
        streams.keep_alive(values, side)
        drop(values)
        del values
        thieves = [torch.full((1 << 20,), -1.0, device=accelerator.device) for _ in range(4)]
        done.synchronize()
        want = torch.full((1 << 20,), float(round_))
        expect_close(seen, want, "Streams.keep_alive", "must keep the bytes until the stream is done")
        del thieves


class TestStreams(StreamsContract):
    pass
