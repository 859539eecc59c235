"""The kernels role on CUDA: one launch per operation, with the torch references to fall back on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accelz import Kernels, check_blocks
from accelz.updates import Update
from accelz_cuda import kernels
from accelz_cuda.kernels import EntryPoint
from accelz_cuda.kernels.launcher import KernelLauncher

BLOCKS_PER_MULTIPROCESSOR = 6
"""Blocks of norm_partials that a multiprocessor holds at a time."""

ANY_ENTRY: dict[str, EntryPoint] = {
    **{name: entries[kernels.F32, None, kernels.F32] for name, entries in kernels.STEPS.items()},
    "norm_and_nonfinite": kernels.NORM_PARTIALS,
    "scale_cast": kernels.SCALE_CAST[kernels.F32, kernels.F32],
    "accumulate": kernels.ACCUMULATE[kernels.F32, kernels.F32],
    "quantise": kernels.QUANTISE[torch.int8, kernels.F32],
    "dequantise": kernels.DEQUANTISE[kernels.F32, torch.int8],
}
"""For each operation, one entry point of the source that implements it."""


class CudaKernels(Kernels):
    """Kernels for contiguous tensors of fp32, bf16, fp16 and, quantised, int8, uint8 and float8_e4m3fn.

    What they do not support (fp64, strided views, operands on several devices) goes to the torch reference,
    and so does everything if they cannot be compiled or loaded; `origin` tells which. They launch on torch's
    current stream of the tensors' device, allocate only through torch and never wait, so a CUDA graph can
    capture them once each has run with the same dtypes. Their writes do not advance autograd's version
    counters.
    """

    def __init__(self, launcher: KernelLauncher | None = None) -> None:
        self._launcher = launcher or KernelLauncher()

    def step(self, update: Update) -> None:
        entry = self._entry_for(update)
        if entry is None:
            super().step(update)
            return
        moments, scales = ((*given, None, None)[:2] for given in (update.moments, update.scales))
        operands = (update.master, update.grad, *moments, *scales, update.weights)
        pointers = map(_pointer, (*operands, update.step, update.grad_scale, update.skip, update.rates))
        sign, numel = -1.0 if update.maximize else 1.0, update.master.numel()
        constants = (*update.constants, *[0.0] * 8)[:8]
        arguments = kernels.UPDATE.pack(
            *pointers, numel, update.lr, sign, update.decay, update.l2, *constants, update.stochastic
        )
        self._launch(entry, update.master, entry.blocks(numel), arguments)

    def norm_and_nonfinite(self, tensors: Sequence[Tensor]) -> Tensor:
        filled = [t for t in tensors if t.numel()]
        if not filled or not all(self._serves_in_norm(t, filled[0]) for t in filled):
            return super().norm_and_nonfinite(tensors)
        groups = [filled[i : i + kernels.MAX_SPANS] for i in range(0, len(filled), kernels.MAX_SPANS)]
        packed = [_pack_spans(group) for group in groups]
        room = BLOCKS_PER_MULTIPROCESSOR * self._launcher.multiprocessors(filled[0].get_device())
        blocks = [min(tiles, room) for _, tiles in packed]
        partials = torch.empty(sum(blocks), dtype=torch.float32, device=filled[0].device)
        output = torch.empty(2, dtype=torch.float32, device=filled[0].device)
        start = partials.data_ptr()
        for group, (spans, tiles), count in zip(groups, packed, blocks, strict=True):
            arguments = kernels.NORM_PARTIALS.arguments.pack(start, len(group), tiles, spans)
            self._launch(kernels.NORM_PARTIALS, partials, count, arguments)
            start += count * partials.itemsize
        arguments = kernels.NORM_TOTAL.arguments.pack(partials.data_ptr(), output.data_ptr(), len(partials))
        self._launch(kernels.NORM_TOTAL, partials, 1, arguments)
        return output

    def scale_cast(self, output: Tensor, source: Tensor, scale: Tensor | None = None) -> None:
        entry = kernels.SCALE_CAST.get((output.dtype, source.dtype))
        only_copies = scale is None and output.dtype is source.dtype
        if (
            entry is None
            or only_copies
            or not self._serves(entry, output, source)
            or not _are_scalars_on(output.device, scale)
        ):
            super().scale_cast(output, source, scale)
            return
        numel = output.numel()
        arguments = entry.arguments.pack(output.data_ptr(), source.data_ptr(), _pointer(scale), numel)
        self._launch(entry, output, entry.blocks(numel), arguments)

    def accumulate(self, total: Tensor, addend: Tensor) -> None:
        entry = kernels.ACCUMULATE.get((total.dtype, addend.dtype))
        if entry is None or not self._serves(entry, total, addend):
            super().accumulate(total, addend)
            return
        arguments = entry.arguments.pack(total.data_ptr(), addend.data_ptr(), total.numel())
        self._launch(entry, total, entry.blocks(total.numel()), arguments)

    def quantise(self, output: Tensor, scales: Tensor, source: Tensor, block: int) -> None:
        check_blocks(output, scales, source, block)
        entry = kernels.QUANTISE.get((output.dtype, source.dtype))
        if entry is None or not self._serves(entry, output, source) or not self._serves(entry, scales):
            super().quantise(output, scales, source, block)
            return
        self._launch_blockwise(entry, (output, scales, source), source.numel(), block)

    def dequantise(self, output: Tensor, source: Tensor, scales: Tensor, block: int) -> None:
        check_blocks(source, scales, output, block)
        entry = kernels.DEQUANTISE.get((output.dtype, source.dtype))
        if entry is None or not self._serves(entry, output, source) or not self._serves(entry, scales):
            super().dequantise(output, source, scales, block)
            return
        self._launch_blockwise(entry, (output, source, scales), source.numel(), block)

    def origin(self, name: str) -> str:
        """Return who implements the operation `name` on the current device, by compiling its kernels."""
        reference, entry = super().origin(name), ANY_ENTRY.get(name)
        if entry is None:
            return reference
        usable = self._launcher.ready(entry, self._launcher.current_device())
        return f"{CudaKernels.__module__}.{CudaKernels.__qualname__}" if usable else "torch reference"

    def _serves(self, entry: EntryPoint, first: Tensor, *others: Tensor | None) -> bool:
        """Whether the kernel can take these operands: of one shape, contiguous, on one device it runs on."""
        device, shape = first.device, first.shape
        if device.type != self._launcher.device_type or not first.is_contiguous():
            return False
        for other in others:
            if other is not None and (
                other.shape != shape or other.device != device or not other.is_contiguous()
            ):
                return False
        return self._launcher.ready(entry, first.get_device())

    def _entry_for(self, update: Update) -> EntryPoint | None:
        """Return the kernel that can make a step, or None if the reference has to."""
        master, weights, moments = update.master, update.weights, update.moments
        dtype = moments[0].dtype if moments else kernels.F32
        kept = None if weights is None else weights.dtype
        dtypes = (update.grad.dtype, master.dtype if update.is_split else kept, dtype)
        entry = kernels.STEPS.get(update.kernel, {}).get(dtypes)
        fits = (
            entry is not None
            and (update.is_split or master.dtype is torch.float32)
            and all(moment.dtype is dtype for moment in moments)
            and self._serves(entry, master, update.grad, *update.moments, weights)
            and all(self._serves(entry, s) and s.dtype is kernels.F32 for s in update.scales)
            and all(s.device == master.device for s in update.scales)
            and _are_scalars_on(master.device, update.step, update.grad_scale, update.skip)
            and (update.rates is None or update.rates.device == master.device)
        )
        return entry if fits else None

    def _serves_in_norm(self, tensor: Tensor, first: Tensor) -> bool:
        return (
            tensor.dtype in kernels.SPAN_FORMATS
            and tensor.device == first.device
            and self._serves(kernels.NORM_PARTIALS, tensor)
        )

    def _launch_blockwise(
        self, entry: EntryPoint, operands: tuple[Tensor, Tensor, Tensor], numel: int, block: int
    ) -> None:
        pointers = (operand.data_ptr() for operand in operands)
        arguments = entry.arguments.pack(*pointers, numel, block.bit_length() - 1)
        self._launch(entry, operands[0], entry.blocks(numel), arguments)

    def _launch(self, entry: EntryPoint, on: Tensor, blocks: int, arguments: bytes) -> None:
        if blocks:
            self._launcher.launch(entry, on.get_device(), blocks, arguments)


def _are_scalars_on(device: torch.device, *scalars: Tensor | None) -> bool:
    return all(
        s is None or (s.dtype is torch.float32 and s.numel() == 1 and s.device == device) for s in scalars
    )


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _pack_spans(tensors: Sequence[Tensor]) -> tuple[bytes, int]:
    """Return the table for norm_partials, and the number of tiles of the tensors."""
    spans, tiles = [], 0
    for tensor in tensors:
        numel = tensor.numel()
        spans.append(kernels.SPAN.pack(tensor.data_ptr(), numel, tiles, kernels.SPAN_FORMATS[tensor.dtype]))
        tiles += -(-numel // kernels.norm_tile(tensor.dtype))
    return b"".join(spans), tiles
