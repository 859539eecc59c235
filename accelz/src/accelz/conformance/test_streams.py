"""The streams role: null objects on a synchronous device, real order between queues elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from accelz.accelerator import Accelerator
from accelz.conformance.contract import expect, expect_close
from accelz.conformance.marks import about, needs, proves

LONG_SECONDS = 0.3
ROUNDS = 5


class StreamsContract:
    """The interface holds on every device; order between streams where `streams` is declared."""

    @about("Streams.current", "Stream.record", "Event.done", "Event.synchronize", "Stream.wait")
    def test_the_interface_holds_everywhere(self, accelerator: Accelerator) -> None:
        """Streams and events can be made, waited for and asked on any device."""
        streams = accelerator.streams
        current = streams.current()
        event = current.record()
        for stream in (current, streams.new(), streams.new(priority=-1)):
            stream.wait(event)
        event.synchronize()
        expect(event.done() is True, "Event.done", "must be True after synchronize()", repr(event.done()))
        streams.synchronize()

    @about("Streams.use")
    def test_use_puts_the_stream_back(self, accelerator: Accelerator) -> None:
        """Work inside `use` is done right, and an exception leaves the streams usable."""
        streams = accelerator.streams
        side = streams.new()
        with pytest.raises(ZeroDivisionError), streams.use(side):
            raise ZeroDivisionError
        with streams.use(side):
            inside = torch.arange(100.0, device=accelerator.device) * 2
            event = side.record()
        streams.current().wait(event)
        expect_close(inside + 1, torch.arange(100.0) * 2 + 1, "Streams.use", "work inside must be done right")

    @about("Streams.keep_alive")
    def test_keep_alive_is_harmless(self, accelerator: Accelerator) -> None:
        """A tensor handed to keep_alive() stays what it is."""
        values = torch.arange(100.0, device=accelerator.device)
        accelerator.streams.keep_alive(values, accelerator.streams.new())
        expect_close(values, torch.arange(100.0), "Streams.keep_alive", "must not change the tensor")

    @about("Event.seconds_since")
    def test_events_measure_time(self, accelerator: Accelerator) -> None:
        """The time between two events is that of the work between them, in seconds."""
        stream = accelerator.streams.current()
        earlier = stream.record()
        started = time.perf_counter()
        long_work(accelerator, LONG_SECONDS / 3)
        later = stream.record()
        seconds = later.seconds_since(earlier)
        limit = time.perf_counter() - started
        came = f"{seconds} s"
        expect(
            0 < seconds <= limit * 1.1 + 0.01, "Event.seconds_since", f"must be between 0 and {limit} s", came
        )
        expect(seconds > limit / 100, "Event.seconds_since", "must be in seconds", came)

    @about("Streams.synchronize")
    def test_synchronize_waits_for_everything(self, accelerator: Accelerator) -> None:
        """After synchronize() every event recorded before is done, whatever its stream."""
        side = accelerator.streams.new()
        with accelerator.streams.use(side):
            long_work(accelerator, LONG_SECONDS / 3)
            event = side.record()
        accelerator.streams.synchronize()
        expect(event.done(), "Streams.synchronize", "must wait for all streams", "an event is still pending")

    @about("Capabilities.asynchronous", "Event.done")
    @proves("asynchronous")
    def test_operations_return_before_they_are_done(self, accelerator: Accelerator) -> None:
        """On an asynchronous device the host is back before the work it queued is finished."""
        long_work(accelerator, LONG_SECONDS)
        event = accelerator.streams.current().record()
        pending = not event.done()
        accelerator.streams.synchronize()
        expect(pending, "Event.done", "must be False right after queueing long work", "already done")

    @about("Streams.new", "Streams.use", "Event.done")
    @proves("streams")
    def test_streams_are_several_queues(self, accelerator: Accelerator) -> None:
        """Short work on one stream finishes while long work on another one is still running."""
        streams = accelerator.streams
        busy, free = streams.new(), streams.new()
        with streams.use(free):
            torch.ones(1, device=accelerator.device)  # whatever a first use costs
        streams.synchronize()
        with streams.use(busy):
            long_work(accelerator, LONG_SECONDS)
            slow = busy.record()
        with streams.use(free):
            torch.ones(1, device=accelerator.device)
            quick = free.record()
        quick.synchronize()
        overtook = not slow.done()
        streams.synchronize()
        expect(
            overtook, "Streams.new", "must give a queue of its own", "a second stream waited for the first"
        )

    @about("Stream.wait", "Stream.record")
    @needs("streams")
    def test_an_event_orders_two_streams(self, accelerator: Accelerator) -> None:
        """Work behind wait(event) sees everything that was queued before the event, the host not blocking."""
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

    @about("Streams.keep_alive")
    @needs("streams")
    def test_keep_alive_protects_freed_memory(self, accelerator: Accelerator) -> None:
        """Memory freed while another stream still has to read it is not given away before that."""
        _part_with_what_is_read(accelerator, lambda values: None)

    @about("Streams.keep_alive")
    @needs("streams", "storage_resize")
    def test_keep_alive_protects_bytes_that_a_resize_drops(self, accelerator: Accelerator) -> None:
        """Bytes that a resize drops while another stream has to read them are not given away before that."""
        _part_with_what_is_read(accelerator, lambda values: values.untyped_storage().resize_(0))


def _part_with_what_is_read(accelerator: Accelerator, drop: Callable[[Tensor], object]) -> None:
    """Part with a tensor that another stream still has to read: `drop` it, then the last reference goes."""
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


def long_work(accelerator: Accelerator, seconds: float) -> Tensor:
    """Queue matrix products that keep the device busy for about `seconds`, on the current stream."""
    matrix = torch.full((1024, 1024), 1 / 1024, device=accelerator.device)
    per_product = _product_seconds(accelerator, matrix)
    for _ in range(max(1, int(seconds / per_product))):
        matrix = matrix @ matrix
    accelerator.flush()
    return matrix


_measured: dict[str, float] = {}


def _product_seconds(accelerator: Accelerator, matrix: Tensor) -> float:
    """Seconds of one product, measured once per device."""
    key = str(accelerator.device)
    if key not in _measured:
        _ = matrix @ matrix
        accelerator.streams.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            matrix = matrix @ matrix
        accelerator.flush()
        accelerator.streams.synchronize()
        _measured[key] = max((time.perf_counter() - started) / 10, 1e-6)
    return _measured[key]
