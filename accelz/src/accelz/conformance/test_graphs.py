"""Graphs: work that is captured once and replayed, where `graph_capture` is declared."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from accelz.accelerator import Accelerator
from accelz.conformance.contract import expect, expect_close, expect_raises
from accelz.conformance.marks import about, needs, proves
from accelz.conformance.steps import StepCase
from accelz.conformance.work import long_work
from accelz.errors import BackendError
from accelz.roles.streams import Graph
from accelz.updates import UPDATES, Update

SECONDS = 0.1
RATES = (1e-3, 7e-4, 0.0, 0.3)
REPLAYS = 8

MOMENTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"moments_dtype": torch.bfloat16},
    "bf16 at random": {"moments_dtype": torch.bfloat16, "settings": {"stochastic": True}},
    "8 bits": {"moments_dtype": torch.uint8},
    "split masters": {"weights_dtype": torch.bfloat16, "split": True},
}


class GraphsContract:
    """What is captured is done by each replay and by nothing else, in order, in memory that stays."""

    @about("Streams.capture", "Graph.replay", "Capabilities.graph_capture")
    @proves("graph_capture")
    def test_a_replay_does_what_was_captured(self, accelerator: Accelerator) -> None:
        """Capturing does nothing; each replay does all, with what the tensors hold then."""
        total, addend, graph = _sum(accelerator)
        expect_close(total, torch.zeros(1000), "Streams.capture", "must record the work and not do it")
        expected = "must do all that was captured, with what the tensors hold then"
        want = 0.0
        for value in (1.0, 1.0, 5.0):
            addend.fill_(value)
            graph.replay()
            want += 2 * value
            expect_close(total, torch.full((1000,), want), "Graph.replay", expected)

    @about("Graph.replay")
    @needs("graph_capture", "streams")
    def test_a_replay_is_in_the_order_of_its_stream(self, accelerator: Accelerator) -> None:
        """A replay comes after what the current stream has queued before, and before its next event."""
        streams = accelerator.streams
        total, addend, graph = _sum(accelerator)
        side = streams.new()
        side.wait(streams.current().record())
        with streams.use(side):
            long_work(accelerator, SECONDS)
            addend.fill_(3.0)
            graph.replay()
            event = side.record()
        pending = not event.done()
        streams.current().wait(event)
        expect_close(total, torch.full((1000,), 6.0), "Graph.replay", "must be in the current stream's order")
        came = "an event behind it and behind long work was done at once"
        expect(pending, "Graph.replay", "must queue the work and not wait for it", came)

    @about("Streams.capture")
    @needs("graph_capture")
    def test_an_error_ends_the_capture(self, accelerator: Accelerator) -> None:
        """An exception comes through; what was recorded is forgotten, and work is done again at once."""
        total, _, graph = _sum(accelerator)
        capture = accelerator.streams.capture

        def fails() -> None:
            total.add_(100.0)
            raise ZeroDivisionError

        expect_raises(
            ZeroDivisionError, "Streams.capture", "must raise what `run` raises", lambda: capture(fails)
        )
        total.add_(1.0)
        expected = "must do nothing of it after an exception, and let work be done again"
        expect_close(total, torch.ones(1000), "Streams.capture", expected)
        graph.replay()
        capture(lambda: _add_twice(total, total)).replay()
        expected = "must work again after an exception"
        expect_close(total, torch.full((1000,), 9.0), "Streams.capture", expected)

    @about("Streams.capture")
    @needs("graph_capture")
    def test_a_capture_inside_a_capture_is_refused(self, accelerator: Accelerator) -> None:
        """One graph is captured after the other."""
        capture = accelerator.streams.capture
        total, _, _ = _sum(accelerator)

        def nested() -> None:
            capture(lambda: _add_twice(total, total))

        expect_raises(
            BackendError, "Streams.capture", "must refuse a capture inside one", lambda: capture(nested)
        )

    @about("Streams.capture")
    @needs("graph_capture")
    def test_memory_of_a_graph_is_its_own(self, accelerator: Accelerator) -> None:
        """What was allocated and freed while capturing is not given to others while the graph lives."""
        total, _, graph = _sum(accelerator)
        others = [torch.full((1000,), -1.0, device=accelerator.device) for _ in range(REPLAYS)]
        graph.replay()
        expect_close(total, torch.full((1000,), 2.0), "Graph.replay", "must find its memory free to use")
        expected = "must not give the memory of what is captured to other tensors"
        for other in others:
            expect_close(other, torch.full((1000,), -1.0), "Streams.capture", expected)

    @about("Streams.capture", "Graph.replay")
    @needs("graph_capture", "exact_memory")
    def test_replays_take_no_memory(self, accelerator: Accelerator) -> None:
        """Counters stay where they are over replays, and a graph that is dropped gives its memory back."""
        streams, memory = accelerator.streams, accelerator.memory
        total, addend = _operands(accelerator)

        def allocated() -> int:
            streams.synchronize()
            return memory.stats().allocated

        gc.collect()  # what earlier tests have left is not to go meanwhile
        before = allocated()
        graph = streams.capture(lambda: _add_twice(total, addend))
        held = allocated()
        for _ in range(REPLAYS):
            graph.replay()
        grown = allocated() - held
        expect(grown <= 0, "Graph.replay", "must take no memory", f"{grown} bytes in {REPLAYS} replays")
        del graph
        kept = allocated() - before
        expect(kept <= 0, "Streams.capture", "must keep nothing of a graph that is gone", f"{kept} bytes")

    @about("Kernels.step", "Streams.capture")
    @needs("graph_capture")
    @pytest.mark.parametrize("moments", MOMENTS)
    @pytest.mark.parametrize("kernel", UPDATES)
    def test_a_step_is_captured(self, accelerator: Accelerator, kernel: str, moments: str) -> None:
        """With `rates`, replays have the bits of steps one by one, whatever lr, grad_scale and skip are."""
        if moments != "fp32" and not UPDATES[kernel].moment_names:
            pytest.skip("it has no moments")
        case = replace(StepCase(kernel, 1500, 1, grad_scale=0.5, skip=0.0), **MOMENTS[moments])
        eager, captured = _Stepped(accelerator, case), _Stepped(accelerator, case)
        for each in (eager, captured):
            each.step(RATES[0], with_rates=each is captured)
        graph = accelerator.streams.capture(lambda: accelerator.kernels.step(captured.update(0.0, True)))
        for turn, lr in enumerate(RATES):
            for each in (eager, captured):
                each.prepare(turn, lr)
            accelerator.kernels.step(eager.update(lr, False))
            graph.replay()
            for got, want in zip(captured.state, eager.state, strict=True):
                expected = f"a replay with lr {lr} in rates must have the bits of a step with that lr"
                expect_close(got, want.cpu(), "Kernels.step", expected)


class _Stepped:
    """A case's state on the device, with the numbers that change from step to step."""

    def __init__(self, accelerator: Accelerator, case: StepCase) -> None:
        self._kernels, self._device = accelerator.kernels, accelerator.device
        self._case = case
        self._values = [value.to(self._device) for value in case.inputs().values()]
        weights = case.weights()
        self._weights = (self._values[0].bfloat16() if weights is None else weights).to(self._device)
        self._first = case.update(*self._values, weights=self._weights)
        self._rates = torch.zeros(2, device=self._device)

    @property
    def state(self) -> tuple[Tensor, ...]:
        master, _, *others = self._values
        return (master, *others, self._weights)

    def update(self, lr: float, with_rates: bool) -> Update:
        return replace(self._first, lr=lr, rates=self._rates if with_rates else None)

    def prepare(self, turn: int, lr: float) -> None:
        """Write the numbers of a step in place."""
        u = self.update(lr, False)
        self._rates.copy_(torch.tensor([u.lr, u.decay]))
        for number, value in ((u.step, 3.0 + turn), (u.grad_scale, 0.5 + turn), (u.skip, float(turn == 1))):
            if number is not None:
                number.fill_(value)

    def step(self, lr: float, with_rates: bool) -> None:
        self.prepare(0, lr)
        self._kernels.step(self.update(lr, with_rates))


def _operands(accelerator: Accelerator) -> tuple[Tensor, Tensor]:
    """Two tensors, with which `_add_twice` has run once."""
    total = torch.zeros(1000, device=accelerator.device)
    addend = torch.ones(1000, device=accelerator.device)
    _add_twice(total, addend)
    total.zero_()
    return total, addend


def _sum(accelerator: Accelerator) -> tuple[Tensor, Tensor, Graph]:
    """A total, an addend, and a graph that adds the second to the first twice."""
    total, addend = _operands(accelerator)
    return total, addend, accelerator.streams.capture(lambda: _add_twice(total, addend))


def _add_twice(total: Tensor, addend: Tensor) -> None:
    total.add_(addend * 2)  # with memory of its own in between


class TestGraphs(GraphsContract):
    pass
