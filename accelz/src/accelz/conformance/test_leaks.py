"""Nothing leaks: repeating an operation of any role leaves the memory counters where they were.

Whatever an operation may keep for its next call exists after the warm-up. From then on, exact counters of a
device must not move by a byte. Inexact counters move by themselves, and so does the memory of the host, whose
page-locked buffers and staging copies are in no device's counters. There, a leak has to add up to more than
this noise: operations that handle memory handle `nbytes` each, and the others are called often.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelz.accelerator import Accelerator
from accelz.conformance.cluster import Cluster, Context
from accelz.conformance.contract import checked, expect
from accelz.conformance.held import Held
from accelz.conformance.marks import about, thorough
from accelz.conformance.steps import usual_step
from accelz.conformance.test_collectives import CALLS, pair_size
from accelz.conformance.test_rng import saved_state
from accelz.roles.flat_buffer import FlatBuffer, Slot
from accelz.roles.kernels import Kernels

MIB = 1 << 20
NBYTES = 2 * MIB
WARM_UP = 2
CALLS_WITH_MEMORY = 16
CALLS_WITHOUT = 256
PLAIN_CALLS = 64
SETTLE_SECONDS = 2.0
"""Time for a library's thread to drop its last buffer, which may be a moment after the wait has returned."""


@dataclass(frozen=True)
class Leaks:
    """Repeats operations and compares the memory held before and after. nbytes: what one of them handles.

    noise: bytes by which host memory, and device memory if its counters are not exact, may grow for other
    reasons. anywhere(grown): whether anything was kept here or by others that do the same at the same time.
    """

    accelerator: Accelerator
    nbytes: int = NBYTES
    noise: int = CALLS_WITH_MEMORY * NBYTES // 4
    anywhere: Callable[[str], bool] = bool

    def check(self, method: str, operation: Callable[[], object], calls: int = CALLS_WITH_MEMORY) -> None:
        """Raise ContractBroken if `calls` calls keep memory on the device or on the host."""
        for _ in range(WARM_UP):
            operation()
        for patience in (0.0, 0.0, SETTLE_SECONDS):
            grown = self._round(operation, calls, patience)
            if not self.anywhere(grown):
                return
        if kept := self._kept_by_the_allocator():
            do = "memory that the allocator has freed must not be counted; see to this before anything else"
            expect(False, "Memory.stats", "tensors that are made and dropped must keep nothing", kept, do)
        expect(not grown, method, "must not keep memory", grown, "release what is no longer used")

    def _kept_by_the_allocator(self) -> str:
        """Say what plain tensors keep: then it is no role's fault that memory grows."""
        size, device = self.nbytes, self.accelerator.device
        return self._round(lambda: torch.empty(size, dtype=torch.uint8, device=device), PLAIN_CALLS, 0.0)

    def _round(self, operation: Callable[[], object], calls: int, patience: float) -> str:
        """Say what `calls` calls have kept, or "" if nothing that counts.

        A leak shows in every round, whereas a pool that a busy machine has made grow has grown once.
        """
        before = Held.now(self.accelerator)
        for _ in range(calls):
            operation()
        deadline = time.monotonic() + patience
        while (grown := self._grown(before, calls)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return grown

    def _grown(self, before: Held, calls: int) -> str:
        """Say what is held beyond `before`, or "" if nothing that counts."""
        more = Held.now(self.accelerator).beyond(before)
        bounds = {
            "device": 0 if self.accelerator.capabilities.exact_memory else self.noise,
            "host": self.noise,
        }
        found = [f"{n} bytes more on the {at}" for at, n in asdict(more).items() if n > bounds[at]]
        return f"{', '.join(found)} after {calls} calls" if found else ""

    def block(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate `nbytes` on the device and write to them."""
        size = self.nbytes // dtype.itemsize
        return torch.full((size,), 1, dtype=dtype, device=self.accelerator.device)


@thorough
class LeakContract:
    @pytest.fixture
    def leaks(self, accelerator: Accelerator) -> Leaks:
        return Leaks(accelerator)

    @about("Accelerator.bind", "Accelerator.flush", "Accelerator.device_count")
    def test_binding_again(self, leaks: Leaks) -> None:
        """Binding the device again, counting devices and flushing keep no memory."""
        accelerator = leaks.accelerator
        leaks.check("Accelerator.bind", lambda: accelerator.bind(0), CALLS_WITHOUT)
        leaks.check("Accelerator.device_count", accelerator.device_count, CALLS_WITHOUT)
        leaks.check("Accelerator.flush", accelerator.flush, CALLS_WITHOUT)

    @about("Memory.stats", "Memory.reset_peak", "Memory.trim")
    def test_reading_counters(self, leaks: Leaks) -> None:
        """Reading and resetting counters and trimming keep no memory."""
        for name in ("stats", "reset_peak", "trim"):
            leaks.check(f"Memory.{name}", getattr(leaks.accelerator.memory, name), CALLS_WITHOUT)

    @about("Memory.empty_host")
    def test_host_memory_comes_back(self, leaks: Leaks) -> None:
        """A host tensor that was copied to the device is given back, or reused for the next one."""

        def operation() -> None:
            host = leaks.accelerator.memory.empty_host((leaks.nbytes // 4,), torch.float32)
            host.fill_(1.0)
            host.to(leaks.accelerator.device, non_blocking=True)
            leaks.accelerator.streams.synchronize()

        leaks.check("Memory.empty_host", operation)

    @about("Streams.keep_alive")
    def test_what_was_kept_alive(self, leaks: Leaks) -> None:
        """Memory kept for a stream is free once the stream is done."""
        streams = leaks.accelerator.streams
        side = streams.new()

        def operation() -> None:
            block = leaks.block()
            side.wait(streams.current().record())
            with streams.use(side):
                block.add_(1)
            streams.keep_alive(block, side)
            del block
            streams.synchronize()

        leaks.check("Streams.keep_alive", operation)

    @about("Streams.use", "Stream.record", "Stream.wait", "Event.synchronize")
    def test_work_on_a_stream(self, leaks: Leaks) -> None:
        """Work on a stream and the events behind it keep nothing once they are done."""
        streams = leaks.accelerator.streams
        side = streams.new()

        def operation() -> None:
            with streams.use(side):
                block = leaks.block()
                event = side.record()
            streams.current().wait(event)
            block.add_(1)
            event.synchronize()
            streams.synchronize()

        leaks.check("Streams.use", operation)

    @about("Rng.seed", "Rng.get_state", "Rng.set_state")
    def test_states_of_generators(self, leaks: Leaks) -> None:
        """Seeding, and saving and restoring states, keep no memory."""
        rng = leaks.accelerator.rng
        leaks.check("Rng.seed", lambda: rng.seed(7), CALLS_WITHOUT)
        leaks.check("Rng.get_state", rng.get_state, CALLS_WITHOUT)
        state = saved_state(leaks.accelerator)
        leaks.check("Rng.set_state", lambda: rng.set_state(state), CALLS_WITHOUT)

    @about("FlatBuffer.release", "FlatBuffer.materialize", "FlatBuffer.bind")
    def test_a_buffer_that_comes_and_goes(self, leaks: Leaks) -> None:
        """A buffer that is materialized, written, bound and released repeatedly leaves nothing behind."""
        buffer = self.flatten(leaks)
        leaks.accelerator.streams.synchronize()
        buffer.release()

        def operation() -> None:
            buffer.materialize()
            buffer.data.fill_(1.0)
            buffer.bind()
            leaks.accelerator.streams.synchronize()
            buffer.release()

        leaks.check("FlatBuffer.release", operation)

    @about("FlatBufferStrategy.flatten")
    def test_forgotten_models(self, leaks: Leaks) -> None:
        """A model that was flattened and forgotten is gone, buffer included."""
        leaks.check("FlatBufferStrategy.flatten", lambda: self.flatten(leaks))

    @about("FlatBufferStrategy.empty_like")
    def test_forgotten_buffers(self, leaks: Leaks) -> None:
        """A buffer of another dtype that was used and forgotten is gone."""
        first = self.flatten(leaks)

        def operation() -> None:
            other = leaks.accelerator.flat_buffers.empty_like(first, torch.float32)
            other.materialize()
            other.data.fill_(1.0)

        leaks.check("FlatBufferStrategy.empty_like", operation)

    def flatten(self, leaks: Leaks) -> FlatBuffer:
        numel = leaks.nbytes // 4
        slot = Slot(0, (numel,), (1,), numel)
        parameter = nn.Parameter(torch.ones(numel))
        return leaks.accelerator.flat_buffers.flatten([parameter], [slot], numel, torch.float32)

    @about("Kernels.step", "Kernels.norm_and_nonfinite", "Kernels.scale_cast", "Kernels.accumulate")
    def test_scratch_memory(self, leaks: Leaks) -> None:
        """Kernels keep no scratch memory except what they reuse."""
        kernels, blocks = leaks.accelerator.kernels, [leaks.block() for _ in range(4)]
        for name, call in KERNEL_CALLS.items():
            leaks.check(f"Kernels.{name}", lambda call=call: call(kernels, *blocks))  # type: ignore[misc]

    @about("Collectives.all_gather", "Collectives.reduce_scatter", "Collectives.all_reduce", "Handle.wait")
    def test_buffers_of_collectives(self, leaks: Leaks, cluster: Callable[[int], Cluster]) -> None:
        """A collective that was waited for lets go of its buffers."""
        cluster(pair_size(leaks.accelerator)).run(collectives_body, limit=100.0)  # many calls


class TestLeaks(LeakContract):
    pass


def _step(kernels: Kernels, *values: Tensor) -> None:
    kernels.step(usual_step("adamw", *values, number=torch.ones((), device=values[0].device)))


KERNEL_CALLS: dict[str, Callable[..., object]] = {
    "step": _step,
    "norm_and_nonfinite": lambda kernels, a, b, c, d: kernels.norm_and_nonfinite([a, b, c, d]),
    "scale_cast": lambda kernels, a, b, *_: kernels.scale_cast(a, b, torch.ones((), device=a.device)),
    "accumulate": lambda kernels, a, b, *_: kernels.accumulate(a, b),
}


def collectives_body(context: Context) -> None:
    accelerator = checked(context.accelerator)

    def on_any_rank(grown: str) -> bool:
        """Return whether memory has grown on any rank, so that all ranks make the same number of calls."""
        told = torch.tensor([float(bool(grown))])
        accelerator.collectives.all_reduce(told, context.group, "max")
        return bool(told)

    leaks = Leaks(accelerator, anywhere=on_any_rank)
    for name, call in CALLS.items():

        def operation(call: Callable[..., Any] = call) -> None:
            shard = leaks.block()
            full = torch.cat([shard] * context.size)
            call(accelerator.collectives, full, shard, context.group).wait()
            accelerator.streams.synchronize()

        leaks.check(f"Collectives.{name}", operation)
