"""The calls to be timed: kernels on flat buffers, and copies within the device and to and from the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from accelz.accelerator import Accelerator
from accelz.conformance.steps import usual_step
from accelz.roles.host import HOST
from accelz.updates import UPDATES

COPY = "copy"
BLOCK = 256


class Case(NamedTuple):
    """A call to be timed. traffic: bytes per element that it has to read and write."""

    operation: str
    dtypes: str
    traffic: float
    call: Callable[[], object]


def cases(accelerator: Accelerator, elements: int) -> Iterator[Case]:
    """Yield the cases, on buffers of `elements` elements; the copy on the device comes first."""

    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, device=accelerator.device)

    def random(dtype: torch.dtype) -> Tensor:
        return empty(dtype).normal_(std=1e-2)

    wide, narrow = torch.float32, torch.bfloat16
    yield _copy_case(accelerator, elements)
    if accelerator.device.type != HOST.type:
        yield from _host_cases(accelerator, elements)
    for kernel in UPDATES:
        yield _step_case(accelerator, kernel, random(wide), random(narrow), empty(narrow))
    yield _step_case(accelerator, "adamw", random(wide), random(wide), None)
    kernels, factor = accelerator.kernels, torch.full((), 0.5, device=accelerator.device)
    for source in (random(narrow), random(wide)):
        yield Case(
            "norm_and_nonfinite",
            _name(source.dtype),
            source.dtype.itemsize,
            partial(kernels.norm_and_nonfinite, [source]),
        )
    for source, output in ((random(wide), empty(narrow)), (random(narrow), empty(wide))):
        yield Case(
            "scale_cast",
            f"{_name(source.dtype)} → {_name(output.dtype)}",
            6,
            partial(kernels.scale_cast, output, source, factor),
        )
    total, addend = random(wide), random(narrow)
    yield Case("accumulate", "bf16 into fp32", 10, partial(kernels.accumulate, total, addend))
    yield from _quantise_cases(accelerator, random(narrow), empty)


def _copy_case(accelerator: Accelerator, elements: int) -> Case:
    """A copy that moves as many bytes as an AdamW step."""
    source = torch.ones(14 * elements, dtype=torch.uint8, device=accelerator.device)
    target = torch.zeros_like(source)
    return Case(COPY, "bytes", 28, lambda: target.copy_(source))


def _host_cases(accelerator: Accelerator, elements: int) -> Iterator[Case]:
    """Copies to and from host memory as the backend allocates it, page-locked if it declares that."""
    near = torch.ones(elements, device=accelerator.device)
    away = accelerator.memory.empty_host((elements,), torch.float32).fill_(1.0)
    yield Case("host to device", "fp32", 4, lambda: near.copy_(away, non_blocking=True))
    yield Case("device to host", "fp32", 4, lambda: away.copy_(near, non_blocking=True))


def _step_case(
    accelerator: Accelerator, kernel: str, master: Tensor, grad: Tensor, weights: Tensor | None
) -> Case:
    """A step reads and writes master and moments, reads the gradient, and writes the weights."""
    moments = [torch.zeros_like(master) for _ in UPDATES[kernel].moment_names]
    number, factor = (torch.full((), value, device=master.device) for value in (3.0, 0.5))
    update = usual_step(kernel, master, grad, *moments, number=number, grad_scale=factor, weights=weights)
    name = f"{_name(grad.dtype)} gradient"
    traffic = 2 * 4 * (1 + len(moments)) + grad.dtype.itemsize
    if weights is not None:
        name, traffic = f"{name}, {_name(weights.dtype)} weights", traffic + weights.dtype.itemsize
    return Case(kernel, name, traffic, partial(accelerator.kernels.step, update))


def _quantise_cases(
    accelerator: Accelerator, source: Tensor, empty: Callable[[torch.dtype], Tensor]
) -> Iterator[Case]:
    """Quantisation from bf16 and back: 3 bytes per element, and a scale per block."""
    kernels, traffic = accelerator.kernels, 3 + 4 / BLOCK
    scales = torch.empty(-(-source.numel() // BLOCK), device=source.device)
    back = torch.empty_like(source)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        codes = empty(dtype)
        yield Case(
            "quantise",
            f"bf16 → {_name(dtype)}",
            traffic,
            partial(kernels.quantise, codes, scales, source, BLOCK),
        )
        yield Case(
            "dequantise",
            f"{_name(dtype)} → bf16",
            traffic,
            partial(kernels.dequantise, back, codes, scales, BLOCK),
        )


def _name(dtype: torch.dtype) -> str:
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}
    return names.get(dtype, str(dtype).removeprefix("torch."))
