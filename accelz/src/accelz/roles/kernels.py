"""The named flat-buffer operations, each with a plain torch reference that works on any device.

A backend subclasses `Kernels` and overrides the operations it can do better. The conformance kit checks
every operation against float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from accelz.dynamic_map import SMALLEST_SCALE
from accelz.updates import UPDATES, Update


class Kernels:
    """Operations on one-dimensional tensors of one device, with results in place; none waits for the device.

    Arguments that are not said to be updated or written stay unchanged, including scalars on the device.

    chunk: the number of elements the references work on at a time, which bounds their scratch memory.
    """

    chunk = 1 << 20

    def step(self, update: Update) -> None:
        """One step of an optimizer on a flat shard, in one pass over it.

        A backend's kernel for an optimizer is a method of the name that `Update.kernel` is, and takes an fp32
        master, fp32 moments and no `rates`; the rest is left to the references. A backend overrides this that
        has kernels for split masters, for moments in 16 or 8 bits, or that read `rates`.
        """
        own = getattr(self, update.kernel, None)
        wide = all(moment.dtype is update.master.dtype for moment in update.moments)
        if own is None or update.is_split or not wide or update.rates is not None:
            update.reference(self.chunk)
        else:
            own(update)

    def norm_and_nonfinite(self, tensors: Sequence[Tensor]) -> Tensor:
        """Compute the sum of squares of all elements, and whether any is NaN or infinite, in one pass.

        tensors: at least one, flat, any floating dtype, on one device. Returns (2,) fp32: the sum
        (accumulated in fp32) and 1.0 or 0.0. Squares that overflow fp32 count as infinite.
        """
        total = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
        for tensor in tensors:
            for part in self._parts(tensor.numel()):
                values = tensor[part].float()
                total = total + torch.dot(values, values)
        return torch.stack((total, (~torch.isfinite(total)).float()))

    def scale_cast(self, output: Tensor, source: Tensor, scale: Tensor | None = None) -> None:
        """output = source × scale, rounded once to output's dtype. scale: 0-dim fp32."""
        if scale is None:
            output.copy_(source)
            return
        for part in self._parts(source.numel()):
            output[part].copy_(source[part].float() * scale)

    def accumulate(self, total: Tensor, addend: Tensor) -> None:
        """total += addend, where total is at least as wide: a 16-bit addend is widened on the fly."""
        total.add_(addend)

    def quantise(self, output: Tensor, scales: Tensor, source: Tensor, block: int) -> None:
        """Quantise symmetrically and block-wise: `block` elements share one scale. For gathers in 8 bits.

        output: (n,) int8 or float8_e4m3fn. scales: (ceil(n / block),) fp32. source: (n,), any floating
        dtype. block: a power of two from 32 to 4096; the last one may be shorter. As in Dettmers et al., 2022
        (arXiv:2110.02861) and ZeRO++ (Wang et al., 2023, arXiv:2306.10209): scale = absmax / 127 for int8
        and absmax / 448 for float8, output = source / scale in fp32, rounded to the nearest, ties to even.

        Error after `dequantise` to fp32, in int8: at most 0.501 scale. In float8: at most 1.001 times the
        larger of |source| / 16 and scale / 1024. A block whose scale would be below 2**-126, the smallest
        normal fp32, becomes 0 with scale 0. A block with a NaN or an infinity becomes 0 with scale NaN, so
        that `dequantise` gives NaN for all of its elements.
        Raises ValueError if dtypes, sizes or the block do not fit.
        """
        check_blocks(output, scales, source, block)
        for part, rows in self._blocks(source.numel(), block):
            values = source[part].float().reshape(scales[rows].numel(), -1)
            scale = values.abs().amax(dim=1, keepdim=True) / LIMITS[output.dtype]
            scale = torch.where(scale < SMALLEST_SCALE, 0.0, scale)
            scale = torch.where(torch.isfinite(scale), scale, math.nan)
            codes = (values * torch.where(scale > 0, 1 / scale, 0.0)).nan_to_num(0.0)
            output[part].copy_((codes.round() if output.dtype is torch.int8 else codes).flatten())
            scales[rows].copy_(scale.flatten())

    def dequantise(self, output: Tensor, source: Tensor, scales: Tensor, block: int) -> None:
        """output = source × the scale of its block in fp32, rounded once to output's dtype.

        output: (n,), any floating dtype. source, scales, block: as in `quantise`, which wrote them.
        Raises ValueError if dtypes, sizes or the block do not fit.
        """
        check_blocks(source, scales, output, block)
        for part, rows in self._blocks(source.numel(), block):
            codes = source[part].float().reshape(scales[rows].numel(), -1)
            output[part].copy_((codes * scales[rows].unsqueeze(1)).flatten())

    def origin(self, name: str) -> str:
        """Return who implements `name`, an operation or an optimizer: "torch reference" or a class."""
        if name not in NAMES:
            raise AttributeError(f"there is no kernel called {name!r}; the names are {', '.join(NAMES)}")
        owner = next(cls for cls in type(self).__mro__ if name in vars(cls) or cls is Kernels)
        return "torch reference" if owner is Kernels else f"{owner.__module__}.{owner.__qualname__}"

    def _parts(self, numel: int) -> Iterator[slice]:
        for start in range(0, numel, self.chunk):
            yield slice(start, min(start + self.chunk, numel))

    def _blocks(self, numel: int, block: int) -> Iterator[tuple[slice, slice]]:
        """Yield slices of elements and of their scales: whole blocks, then a shorter last one alone."""
        whole = numel // block * block
        step = max(self.chunk // block, 1) * block
        for start in range(0, whole, step):
            stop = min(start + step, whole)
            yield slice(start, stop), slice(start // block, stop // block)
        if whole < numel:
            yield slice(whole, numel), slice(whole // block, None)


NAMES = (*UPDATES, "norm_and_nonfinite", "scale_cast", "accumulate", "quantise", "dequantise")
"""Every kernel: the optimizers' steps, and the other operations."""

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The dtypes of quantised values, each with the value that a block's largest element is mapped to."""

MIN_BLOCK, MAX_BLOCK = 32, 4096


def check_blocks(codes: Tensor, scales: Tensor, values: Tensor, block: int) -> None:
    """Raise ValueError unless codes, scales and values fit together as `Kernels.quantise` describes."""
    if not MIN_BLOCK <= block <= MAX_BLOCK or block & (block - 1):
        raise ValueError(f"expected a block of {MIN_BLOCK} to {MAX_BLOCK}, a power of two, got {block}")
    if codes.dtype not in LIMITS or scales.dtype is not torch.float32 or not values.is_floating_point():
        raise ValueError(
            "expected int8 or float8_e4m3fn for quantised values, float32 for scales and a floating-point "
            f"dtype for plain values, got {codes.dtype}, {scales.dtype} and {values.dtype}"
        )
    numel = values.numel()
    shapes = [tuple(t.shape) for t in (values, codes, scales)]
    if shapes != [(numel,), (numel,), (-(-numel // block),)]:
        raise ValueError(
            f"expected n plain and n quantised values and ceil(n / {block}) scales, all one-dimensional, "
            f"got shapes {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
