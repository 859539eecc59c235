"""The CUDA kernels on a GPU, wherever one is found: the kit's contract, and what only a device shows.

`scripts/device-check cuda` runs this file as its step `kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from accelz import Accelerator
from accelz.conformance.contract import checked
from accelz.conformance.test_kernels import KernelContract
from accelz.conformance.work import long_work
from accelz.updates import AdamWUpdate
from accelz_cuda import kernels
from accelz_cuda.accelerator import build
from accelz_cuda.cuda_kernels import ANY_ENTRY, CudaKernels
from accelz_cuda.kernels import EntryPoint
from accelz_cuda.probe import probe

from .cuda_operations import OPERATIONS, operation

if not probe().available:
    pytest.skip(probe().reason, allow_module_level=True)

NUMEL = 70_001
OVER_32_BITS = (1 << 31) + 17
LONG_SECONDS = 0.2
POISON = 0x55


@pytest.fixture(scope="module")
def gpu() -> Accelerator:
    accelerator = build()
    accelerator.bind(0)
    return accelerator


@pytest.fixture(scope="module")
def accelerator(gpu: Accelerator) -> Accelerator:
    return checked(gpu)


class TestContract(KernelContract):
    """All that the kit asks of the kernels role, float64 and awkward places included."""


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def every_operation() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("entry", OPERATIONS, ids=lambda entry: entry.name)


def bits(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.clone().view(torch.uint8) for tensor in tensors]


def test_no_reference_serves_where_there_is_a_kernel(gpu: Accelerator) -> None:
    ours = f"{CudaKernels.__module__}.{CudaKernels.__qualname__}"
    assert {name: gpu.kernels.origin(name) for name in ANY_ENTRY} == dict.fromkeys(ANY_ENTRY, ours)


@every_operation()
def test_a_graph_replays_the_bits_of_eager(gpu: Accelerator, entry: EntryPoint) -> None:
    call = operation(entry, gpu.device, NUMEL)
    first = bits(call(gpu.kernels))  # compiled, and allocated
    second = bits(call(gpu.kernels))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        written = call(gpu.kernels)
    for tensor, before, after in zip(written, first, second, strict=True):
        is_read = not torch.equal(before, after)  # it goes on from what it was
        tensor.view(torch.uint8).copy_(before if is_read else before ^ POISON)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(bits(written), second, strict=True))


def test_a_replayed_step_reads_its_scalars_again(gpu: Accelerator) -> None:
    """Step, unscaling factor and the decision to skip are on the device, and a graph must not freeze them."""
    rows = torch.rand(5, NUMEL, device=gpu.device)
    master, grad, average, square = rows[:4]
    step, factor, skip = (torch.tensor(value, device=gpu.device) for value in (1.0, 0.5, 0.0))

    update = AdamWUpdate(
        master=master, grad=grad, exp_avg=average, exp_avg_sq=square, step=step, grad_scale=factor, skip=skip,
        lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1,
    )  # fmt: skip

    def call() -> None:
        gpu.kernels.step(update)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for values in ((2.0, 0.25, 0.0), (3.0, 4.0, 0.0), (4.0, 1.0, 1.0)):
        for scalar, value in zip((step, factor, skip), values, strict=True):
            scalar.fill_(value)
        before = rows.clone()
        call()
        eager = rows.clone()
        rows.copy_(before)
        graph.replay()
        assert torch.equal(rows, eager)
        assert torch.equal(eager, before) is bool(values[2])


@every_operation()
def test_nothing_waits_for_the_device(gpu: Accelerator, entry: EntryPoint) -> None:
    call = operation(entry, gpu.device, NUMEL)
    call(gpu.kernels)
    gpu.streams.synchronize()
    long_work(gpu, LONG_SECONDS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(gpu.kernels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    pending = not gpu.streams.current().record().done()
    gpu.streams.synchronize()
    assert pending


@pytest.mark.parametrize("what", ["a kernel", "a copy"])
def test_work_on_another_stream_overtakes(gpu: Accelerator, what: str) -> None:
    """It is on torch's current stream, and nothing puts it behind those of others."""
    streams = gpu.streams
    source, target = (torch.rand(1 << 20, device=gpu.device) for _ in range(2))
    busy, free = streams.new(), streams.new()

    def work() -> None:
        if what == "a copy":
            target.copy_(source)
        else:
            gpu.kernels.accumulate(target, source)

    with streams.use(free):
        work()  # whatever a first use costs
    streams.synchronize()
    with streams.use(busy):
        long_work(gpu, LONG_SECONDS)
        slow = busy.record()
    with streams.use(free):
        work()
        quick = free.record()
    quick.synchronize()
    overtook = not slow.done()
    streams.synchronize()
    assert overtook


@pytest.mark.parametrize("dtype", [kernels.BF16, kernels.F16], ids=str)
def test_more_elements_than_32_bits_count(gpu: Accelerator, dtype: torch.dtype) -> None:
    if gpu.memory.stats().free < 8 * OVER_32_BITS:
        pytest.skip("the device has too little memory")
    total, addend = (torch.ones(OVER_32_BITS, dtype=dtype, device=gpu.device) for _ in range(2))
    gpu.kernels.accumulate(total, addend)
    assert bool((total == 2).all())
    gpu.kernels.scale_cast(addend, total, torch.tensor(0.5, device=gpu.device))
    assert bool((addend == 1).all())
    square, nonfinite = gpu.kernels.norm_and_nonfinite([addend]).tolist()
    assert (square, nonfinite) == (pytest.approx(OVER_32_BITS, rel=1e-6), 0)
