"""What a device can do: declared here by its backend, proved by the conformance kit."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch

Compilation = Literal["none", "aot_eager", "inductor"]
COMPILATIONS: tuple[Compilation, ...] = get_args(Compilation)
"""From the least to the most; each includes those before it."""

Scaling = Literal["none", "tensorwise", "rowwise"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
"""From the least to the most; each includes those before it."""


@dataclass(frozen=True)
class Capabilities:
    """Facts about a device that an engine or a test may ask for. By default nothing is declared.

    asynchronous: operations return before the device has finished them.
    streams: the device has several ordered queues, with events to order them; otherwise null objects serve.
    pinned_host_memory: `memory.empty_host` returns page-locked memory for asynchronous copies.
    storage_resize: a storage can be shrunk to 0 bytes and grown again in place, under live views.
    host_data_assignment: a device Parameter's `.data` may be set to a host tensor and back.
    async_collectives: a collective called with async_op=True may return before it is complete.
    lazy_graph: operations are recorded and run at `Accelerator.flush()`.
    exact_memory: `memory.stats()` counts the device bytes of this process and of no other.
    memory_granularity: bytes, at least 1, by which an allocation may count for more than was asked for. Above
    1, the device's allocator hands out blocks of certain sizes, which fragment.
    graph_capture: `streams.capture` records work, which a graph then queues as a whole, without what each
    operation costs on the host; optimizers' kernels can be captured with `Update.rates`.
    one_device_per_process: a process cannot use a second device of this type.
    shared_device: several ranks may use one device at the same time, also for collectives between them.
    compile: what `torch.compile` does for the device. "aot_eager": graphs of forward and backward are traced
    and run one operation at a time. "inductor": code is generated for them too.
    dtypes: the floating-point types that kernels, matrix products and collectives support; float32 always.
    peak_flops: the floating-point operations in a second that the device's data sheet gives for dense matrix
    products in 16 bits; 0 where it is not known. By it, an engine tells the share that training reaches.
    scaled_mm: the fp32 scales with which `torch._scaled_mm` multiplies in 8 bits: a row-major matrix by a
    column-major one, of sizes in multiples of 16. "tensorwise": one for each matrix; both are float8_e4m3fn,
    or one is float8_e5m2, and the result is bf16 or fp32. "rowwise": also one for each row of the first and
    each column of the second; both are float8_e4m3fn, and the result is bf16.
    link_bandwidth: the bytes in a second that the device's data sheet lets it send to other devices of its
    node, over all its links together, in one direction; 0 where it is not known. It bounds the bus bandwidth:
    of an all-gather of n bytes over r ranks, each receives n (r - 1) / r, which takes no less than that
    divided by it. By it, a planner tells how long a step takes at least.
    profiler_ranges: `Accelerator.profiler_range` shows in the vendor's profiler.
    communication_buffers: `collectives.empty` returns memory that collectives read in place.
    """

    asynchronous: bool = False
    streams: bool = False
    pinned_host_memory: bool = False
    storage_resize: bool = False
    host_data_assignment: bool = False
    async_collectives: bool = False
    lazy_graph: bool = False
    exact_memory: bool = False
    memory_granularity: int = 1
    graph_capture: bool = False
    one_device_per_process: bool = False
    shared_device: bool = False
    compile: Compilation = "none"
    dtypes: frozenset[torch.dtype] = frozenset({torch.float32})
    peak_flops: float = 0.0
    scaled_mm: Scaling = "none"
    link_bandwidth: float = 0.0
    profiler_ranges: bool = False
    communication_buffers: bool = False

    def flags(self) -> dict[str, bool]:
        """The yes/no capabilities by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.type in ("bool", bool)}

    def compiles(self, how: Compilation) -> bool:
        """Whether torch.compile does at least this much for the device."""
        return COMPILATIONS.index(self.compile) >= COMPILATIONS.index(how)

    def scales(self, how: Scaling) -> bool:
        """Whether products in 8 bits may have at least these scales."""
        return SCALINGS.index(self.scaled_mm) >= SCALINGS.index(how)

    @property
    def counts_every_byte(self) -> bool:
        """Whether `memory.stats()` is exact to the byte."""
        return self.exact_memory and self.memory_granularity == 1
