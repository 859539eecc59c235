"""The named flat-buffer operations, each with a plain torch reference that works on any device.

A backend subclasses `Kernels` and overrides the operations it can do better. The conformance kit checks
every operation against float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from accelz.roles.updates import AdamWUpdate, LionUpdate, SgdUpdate


class Kernels:
    """Operations on one-dimensional tensors of one device, with results in place; none waits for the device.

    Arguments that are not said to be updated or written stay unchanged, including scalars on the device.

    chunk: the number of elements the references work on at a time, which bounds their scratch memory.
    """

    chunk = 1 << 20

    def adamw(self, update: AdamWUpdate) -> None:
        """One Adam step on a flat shard, in one pass over it."""
        correction1 = _bias_correction(update.beta1, update.step)
        correction2_sqrt = _bias_correction(update.beta2, update.step).sqrt()
        step_size = update.lr / correction1
        for u in update.split(self.chunk):
            new = u.master.mul(1 - u.lr * u.weight_decay) if u.decoupled else u.master.clone()
            g = u.gradient()
            g = g if u.decoupled or not u.weight_decay else g.add(new, alpha=u.weight_decay)
            m = torch.lerp(u.exp_avg, g, 1 - u.beta1)
            v = (u.exp_avg_sq * u.beta2).addcmul_(g, g, value=1 - u.beta2)
            new.sub_(m / (v.sqrt() / correction2_sqrt).add_(u.eps) * step_size)
            u.write(new, m, v)

    def sgd(self, update: SgdUpdate) -> None:
        """One step of stochastic gradient descent on a flat shard, in one pass over it."""
        for u in update.split(self.chunk):
            g = u.gradient()
            g = g.add(u.master, alpha=u.weight_decay) if u.weight_decay else g
            moments = []
            if u.momentum_buffer is not None:
                moments = [u.momentum_buffer * u.momentum + g]
                g = g.add(moments[0], alpha=u.momentum) if u.nesterov else moments[0]
            u.write(u.master.sub(g, alpha=u.lr), *moments)

    def lion(self, update: LionUpdate) -> None:
        """One Lion step (Chen et al., 2023, arXiv:2302.06675) on a flat shard, in one pass over it.

        The step goes by lr against the sign of beta1 × exp_avg + (1 - beta1) × gradient.
        """
        for u in update.split(self.chunk):
            g = u.gradient()
            direction = torch.lerp(u.exp_avg, g, 1 - u.beta1).sign_()
            new = u.master.mul(1 - u.lr * u.weight_decay).sub_(direction, alpha=u.lr)
            u.write(new, torch.lerp(u.exp_avg, g, 1 - u.beta2))

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
        """Return who implements the operation `name`: "torch reference" or the overriding class."""
        for cls in type(self).__mro__:
            if name in vars(cls):
                return "torch reference" if cls is Kernels else f"{cls.__module__}.{cls.__qualname__}"
        raise AttributeError(f"there is no kernel called {name!r}; the names are {', '.join(NAMES)}")

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


NAMES = ("adamw", "sgd", "lion", "norm_and_nonfinite", "scale_cast", "accumulate", "quantise", "dequantise")
"""Every kernel, by the name of its method."""

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The dtypes of quantised values, each with the value that a block's largest element is mapped to."""

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Scales below the smallest normal fp32 become 0: their reciprocals overflow, and devices may flush them."""

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


def _bias_correction(beta: float, step: Tensor) -> Tensor:
    """1 - beta ** step, accurate in fp32 and without waiting for the device."""
    log_beta = math.log(beta) if beta > 0 else -math.inf
    return -torch.expm1(step * log_beta)
