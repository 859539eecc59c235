"""The operation that each CUDA kernel is for, on tensors of its dtypes; for a GPU and for the emulation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelz import Kernels
from accelz.conformance.steps import usual_step
from accelz.updates import REMAINDER, UPDATES, split_master
from accelz_cuda import kernels
from accelz_cuda.kernels import EntryPoint

F32 = torch.float32
BLOCK = 64
ADAM: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
DTYPES = {name: dtype for dtype, name in kernels.NAMES.items()}

OPERATIONS = tuple(entry for entry in kernels.ENTRIES if entry is not kernels.NORM_TOTAL)
"""An entry for every operation; the norm's second kernel belongs to its first."""

Call = Callable[[Kernels], tuple[Tensor, ...]]
"""Does the operation and returns all that it wrote."""


def operation(entry: EntryPoint, device: torch.device, numel: int = 70) -> Call:
    """What `entry` is for, on random values of `numel` elements."""
    parts = 3 if entry.source in UPDATES else 2
    name, *dtypes = entry.name.rsplit("_", parts) if entry.source != "norm" else ("norm",)
    return _MAKERS[name](device, numel, *(DTYPES.get(dtype) for dtype in dtypes))


def random(device: torch.device, numel: int, dtype: torch.dtype | None) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    return (torch.rand(numel, generator=generator) + 0.5).to(device, dtype)


def _step(
    kernel: str,
    device: torch.device,
    numel: int,
    grad: torch.dtype,
    weights: torch.dtype | None,
    kept: torch.dtype,
) -> Call:
    master = random(device, numel, F32)
    names = UPDATES[kernel].moment_names
    moments = [random(device, numel, kept) for _ in names]
    scales = tuple(random(device, -(-numel // 256), F32) for _ in names if kept is torch.uint8)
    number, scale, skip = (torch.tensor(value, device=device) for value in (3.0, 0.5, 0.0))
    narrow = None if weights is None else random(device, numel, weights)
    if weights is REMAINDER:
        narrow, master = split_master(master)
    update = usual_step(
        kernel, master, random(device, numel, grad), *moments, number=number, grad_scale=scale, skip=skip,
        weights=narrow, scales=scales,
    )  # fmt: skip

    def call(served: Kernels) -> tuple[Tensor, ...]:
        served.step(update)
        return (master, *moments, *scales, *([] if narrow is None else [narrow]))

    return call


def _norm(device: torch.device, numel: int) -> Call:
    tensors = [random(device, numel + i, dtype) for i, dtype in enumerate(kernels.FLOATS)]
    return lambda served: (served.norm_and_nonfinite(tensors),)


def _scale_cast(device: torch.device, numel: int, to: torch.dtype, source: torch.dtype) -> Call:
    output, values, scale = (
        random(device, numel, to),
        random(device, numel, source),
        torch.tensor(2.0, device=device),
    )

    def call(served: Kernels) -> tuple[Tensor, ...]:
        served.scale_cast(output, values, scale)
        return (output,)

    return call


def _accumulate(device: torch.device, numel: int, total: torch.dtype, addend: torch.dtype) -> Call:
    sums, values = random(device, numel, total), random(device, numel, addend)

    def call(served: Kernels) -> tuple[Tensor, ...]:
        served.accumulate(sums, values)
        return (sums,)

    return call


def _quantise(device: torch.device, numel: int, codes: torch.dtype, source: torch.dtype) -> Call:
    output, scales = random(device, numel, codes), random(device, -(-numel // BLOCK), F32)
    values = random(device, numel, source)

    def call(served: Kernels) -> tuple[Tensor, ...]:
        served.quantise(output, scales, values, BLOCK)
        return (output, scales)

    return call


def _dequantise(device: torch.device, numel: int, to: torch.dtype, codes: torch.dtype) -> Call:
    output, scales = random(device, numel, to), random(device, -(-numel // BLOCK), F32)
    values = (100 * random(device, numel, F32)).to(codes)

    def call(served: Kernels) -> tuple[Tensor, ...]:
        served.dequantise(output, values, scales, BLOCK)
        return (output,)

    return call


_MAKERS: dict[str, Callable[..., Call]] = {
    **{kernel: partial(_step, kernel) for kernel in UPDATES},
    "norm": _norm,
    "scale_cast": _scale_cast,
    "accumulate": _accumulate,
    "quantise": _quantise,
    "dequantise": _dequantise,
}
