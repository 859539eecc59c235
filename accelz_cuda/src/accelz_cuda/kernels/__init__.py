"""The CUDA sources, and what Python has to know of them: entry points, argument structs, elements per block.

Every entry point takes one struct by value. `EntryPoint.arguments` packs it with its fields in the order of
the source and with the C compiler's alignment.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from accelz.updates import REMAINDER, UPDATES

FOLDER = Path(__file__).parent
OPTIMIZERS = tuple(name for name in UPDATES if (FOLDER / f"{name}.cu").exists())
SOURCES = (*OPTIMIZERS, "norm", "scale_cast", "accumulate", "blockwise")
THREADS = 256
"""Threads per block, for all kernels (kThreads in tiles.cuh)."""

MAX_SPANS = 128
"""Tensors that one launch of norm_partials takes (kSpans in norm.cu)."""

F32, BF16, F16, U8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
NAMES = {
    F32: "f32",
    BF16: "bf16",
    F16: "f16",
    U8: "u8",
    torch.int8: "s8",
    torch.float8_e4m3fn: "e4m3",
    REMAINDER: "split",
}
FLOATS = (F32, BF16, F16)
CODES = (torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True)
class EntryPoint:
    """A kernel. source: the file it is in. arguments: its struct. tile: elements that one block processes."""

    name: str
    source: str
    arguments: struct.Struct
    tile: int

    def blocks(self, numel: int) -> int:
        """The number of blocks for `numel` elements."""
        return -(-numel // self.tile)


def source_text(source: str) -> str:
    """Return the CUDA C++ of a source."""
    return (FOLDER / f"{source}.cu").read_text()


def header_texts() -> dict[str, str]:
    """Return the headers that sources include, by file name."""
    return {path.name: path.read_text() for path in sorted(FOLDER.glob("*.cuh"))}


def _width(*dtypes: torch.dtype) -> int:
    """Elements in a pack, in which the widest operand takes 16 bytes."""
    return 16 // max(dtype.itemsize for dtype in dtypes)


def _per_pair(
    source: str, layout: str, packs: int, pairs: list[tuple[torch.dtype, torch.dtype]], name: str = ""
) -> dict[tuple[torch.dtype, torch.dtype], EntryPoint]:
    """Return an entry for each pair of dtypes, with `packs` packs per thread."""
    arguments = struct.Struct(layout)
    return {
        (a, b): EntryPoint(
            f"{name or source}_{NAMES[a]}_{NAMES[b]}", source, arguments, THREADS * packs * _width(a, b)
        )
        for a, b in pairs
    }


StepEntries = dict[tuple[torch.dtype, torch.dtype | None, torch.dtype], EntryPoint]
"""Entries by the dtypes of the gradient, of the 16-bit weights (of split masters: of the remainders), and of
the moments: fp32 where there are none, uint8 where they are codes."""


UPDATE = struct.Struct("@11Pq12fi0q")


def _steps(name: str) -> StepEntries:
    """Return one optimizer's kernels."""
    return {
        (grad, weights, moments): EntryPoint(
            f"{name}_{NAMES[grad]}_{NAMES[weights] if weights else 'none'}_{NAMES[moments]}",
            name,
            UPDATE,
            THREADS * (8 if moments is U8 else 4),
        )
        for grad in FLOATS
        for weights in (None, BF16, F16, REMAINDER)
        for moments in ((F32, BF16, U8) if UPDATES[name].moment_names else (F32,))
    }


STEPS = {name: _steps(name) for name in OPTIMIZERS}
"""By the optimizer."""

SCALE_CAST = _per_pair("scale_cast", "@3Pq", 4, [(to, source) for to in FLOATS for source in FLOATS])
"""By the dtypes of output and source."""

ACCUMULATE = _per_pair(
    "accumulate", "@2Pq", 2, [(F32, F32), (F32, BF16), (F32, F16), (BF16, BF16), (F16, F16)]
)
"""By the dtypes of total and addend."""

DEQUANTISE = _per_pair(
    "blockwise", "@3Pqi0q", 4, [(to, codes) for codes in CODES for to in FLOATS], "dequantise"
)
"""By the dtypes of output and source."""

QUANTISE: dict[tuple[torch.dtype, torch.dtype], EntryPoint] = {
    (codes, source): EntryPoint(
        f"quantise_{NAMES[codes]}_{NAMES[source]}", "blockwise", struct.Struct("@3Pqi0q"), THREADS * 16
    )
    for codes in CODES
    for source in FLOATS
}
"""By the dtypes of output and source."""

SPAN = struct.Struct("@Pq2i")
SPAN_FORMATS = {F32: 0, BF16: 1, F16: 2}
NORM_PARTIALS = EntryPoint("norm_partials", "norm", struct.Struct(f"@P2i{MAX_SPANS * SPAN.size}s"), 0)
NORM_TOTAL = EntryPoint("norm_total", "norm", struct.Struct("@2Pq"), 0)

ENTRIES: tuple[EntryPoint, ...] = (
    *(entry for entries in STEPS.values() for entry in entries.values()),
    *SCALE_CAST.values(),
    *ACCUMULATE.values(),
    *QUANTISE.values(),
    *DEQUANTISE.values(),
    NORM_PARTIALS,
    NORM_TOTAL,
)
"""Every entry point of every source."""


def norm_tile(dtype: torch.dtype) -> int:
    """Elements in a tile of norm_partials."""
    return THREADS * 4 * _width(dtype)
