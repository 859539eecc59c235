"""Casting between floating-point dtypes, rounding as torch does: to nearest, ties to even.

Written without torch, whose import takes longer than consolidating many a model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from zero.errors import CheckpointError

_PLAIN: dict[str, np.dtype[Any]] = {"F64": np.dtype("f8"), "F32": np.dtype("f4"), "F16": np.dtype("f2")}
_AT_ONCE = 1 << 16  # elements per pass, so that they stay in the processor's cache
_QUIET_NAN = 0x7FC0
Floats = npt.NDArray[np.floating[Any]]


def cast(values: memoryview, stored: str, into: memoryview, wanted: str) -> bool:
    """Fill `into` with the elements of `values`, cast. stored, wanted: dtypes, named as in safetensors.

    Returns whether finite values became infinite in fp16. Raises CheckpointError for dtypes that are not
    supported.
    """
    source = _widened(values, stored)
    if wanted == "BF16":
        _to_bf16(source.astype(np.float32, copy=False), np.frombuffer(into, np.uint16))
        return False
    if wanted not in _PLAIN:
        raise CheckpointError(f"cannot cast values from {stored} to {wanted}")
    found = np.frombuffer(into, _PLAIN[wanted])
    with np.errstate(over="ignore", invalid="ignore"):  # a signalling NaN becomes a quiet one
        if wanted == "F16" and stored == "F64":
            source = source.astype(np.float32)  # torch rounds twice, too
        np.copyto(found, source, casting="unsafe")
    return wanted == "F16" and not np.array_equal(np.isinf(found), np.isinf(source))


def _widened(values: memoryview, stored: str) -> Floats:
    """The values in a dtype that numpy has and that represents them exactly."""
    if stored in _PLAIN:
        return np.frombuffer(values, _PLAIN[stored])
    if stored == "BF16":
        return (np.frombuffer(values, np.uint16).astype(np.uint32) << 16).view(np.float32)
    raise CheckpointError(f"cannot cast values from {stored}")


def _to_bf16(source: npt.NDArray[np.float32], into: npt.NDArray[np.uint16]) -> None:
    """Round to bf16: add half of the last bit that is kept, or just less if that is even, and truncate."""
    bits = source.view(np.uint32)
    scratch = np.empty(min(_AT_ONCE, bits.size), np.uint32)
    for first in range(0, bits.size, _AT_ONCE):
        part = bits[first : first + _AT_ONCE]
        rounded = scratch[: part.size]
        np.right_shift(part, 16, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)
        np.add(rounded, 0x7FFF, out=rounded)
        np.add(rounded, part, out=rounded)
        np.right_shift(rounded, 16, out=rounded)
        into[first : first + _AT_ONCE] = rounded
        nan = np.isnan(source[first : first + _AT_ONCE])
        if nan.any():
            into[first : first + _AT_ONCE][nan] = _QUIET_NAN
