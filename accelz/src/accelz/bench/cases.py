"""The calls to be timed: kernels on flat buffers, and copies within the device and to and from the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelz.accelerator import Accelerator
from accelz.roles.host import HOST
from accelz.roles.updates import AdamWUpdate, LionUpdate, SgdUpdate

COPY = "copy"
BLOCK = 256
ADAMW: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


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
    yield _adamw_case(accelerator, random(wide), random(narrow), empty(narrow))
    yield _adamw_case(accelerator, random(wide), random(wide), None)
    yield from _one_moment_cases(accelerator, random(wide), random(narrow), empty(narrow))
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


def _adamw_case(accelerator: Accelerator, master: Tensor, grad: Tensor, weights: Tensor | None) -> Case:
    average, square = torch.zeros_like(master), torch.zeros_like(master)
    step = torch.full((), 3.0, device=master.device)
    factor = torch.full((), 0.5, device=master.device)

    update = AdamWUpdate(
        master=master, grad=grad, exp_avg=average, exp_avg_sq=square, step=step, grad_scale=factor,
        weights=weights, **ADAMW,
    )  # fmt: skip
    name = f"{_name(grad.dtype)} gradient" + (
        f", {_name(weights.dtype)} weights" if weights is not None else ""
    )
    return Case("adamw", name, 28, partial(accelerator.kernels.adamw, update))


def _one_moment_cases(
    accelerator: Accelerator, master: Tensor, grad: Tensor, weights: Tensor
) -> Iterator[Case]:
    """The optimizers with one moment: they read and write the moment and the master."""
    moment, kernels = torch.zeros_like(master), accelerator.kernels
    name = f"{_name(grad.dtype)} gradient, {_name(weights.dtype)} weights"
    shared: dict[str, Any] = {"master": master, "grad": grad, "weights": weights, "weight_decay": 0.1}
    momentum = SgdUpdate(**shared, momentum_buffer=moment, lr=1e-3, momentum=0.9)
    yield Case("sgd", f"{name}, momentum", 20, partial(kernels.sgd, momentum))
    lion = LionUpdate(**shared, exp_avg=moment, lr=1e-4, beta1=0.9, beta2=0.99)
    yield Case("lion", name, 20, partial(kernels.lion, lion))


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
