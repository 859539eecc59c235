"""The native library (csrc/accelz_cpu.h), loaded with ctypes, so that calls release the GIL."""

from __future__ import annotations

import ctypes
from ctypes import CDLL, POINTER, Structure, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

import accelz_cpu
from accelz.ranks import machine

ABI = 10
LIBRARY = "libaccelz_cpu.so"
DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int64: 4,
    torch.int32: 5,
    torch.uint8: 6,
}
"""The dtypes that collectives take."""

CODES = {torch.int8: 7, torch.float8_e4m3fn: 8}
"""The dtypes of quantised values, which only the kernels take."""

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""The dtypes that the kernels take."""


class NativeUpdate(Structure):
    """The header's accelz_update."""

    _fields_ = (
        ("master", c_void_p),
        ("remainder", c_void_p),
        ("grad", c_void_p),
        ("moments", c_void_p * 2),
        ("scales", c_void_p * 2),
        *((name, c_void_p) for name in ("weights", "step", "grad_scale", "skip")),
        ("numel", c_size_t),
        ("grad_dtype", c_int),
        *((name, c_int) for name in ("weights_dtype", "moments_dtype", "stochastic")),
        *((name, c_double) for name in ("lr", "sign", "decay", "l2")),
        ("constants", c_double * 8),
    )


_P, _I, _N = c_void_p, c_int, c_size_t
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "accelz_isa": (c_char_p, ()),
    "accelz_use_isa": (_I, (c_char_p,)),
    "accelz_last_error": (c_char_p, ()),
    "accelz_optimizer": (c_char_p, (_I,)),
    "accelz_step": (None, (_I, POINTER(NativeUpdate), _I)),
    "accelz_sum_of_squares": (c_double, (_P, _I, _N, _I)),
    "accelz_scale_cast": (None, (_P, _I, _P, _I, _P, _N, _I)),
    "accelz_accumulate": (None, (_P, _I, _P, _I, _N, _I)),
    "accelz_quantise": (None, (_P, _I, _P, _P, _I, _N, _N, _I)),
    "accelz_dequantise": (None, (_P, _I, _P, _I, _P, _N, _N, _I)),
    "accelz_reduce": (None, (_P, _P, _I, _I, _I, _N, _I)),
    "accelz_channel_create": (_P, (_I, _I)),
    "accelz_channel_descriptor": (_I, (_P,)),
    "accelz_channel_connect": (_I, (_P, POINTER(c_int64), POINTER(c_int))),
    "accelz_start": (c_int64, (_P, _I, _I, _I, _N, _I, _P, _P, c_double, _I)),
    "accelz_start_all_to_all": (
        c_int64,
        (_P, _I, _P, POINTER(c_uint64), _P, POINTER(c_uint64), c_double, _I),
    ),
    "accelz_finish": (_I, (_P, c_int64, _I)),
    "accelz_abandon": (None, (_P, c_int64)),
    "accelz_channel_fail": (None, (_P, c_char_p)),
    "accelz_lend": (_P, (_P, _N)),
    "accelz_channel_bytes": (_N, (_P,)),
    "accelz_channel_close": (None, (_P, c_double)),
}


@cache
def library() -> CDLL | None:
    """Return the library, or None, with one warning, if it was not built or does not load."""
    path = _find()
    if path is None:
        _warn(f"{LIBRARY} is missing: the package was installed without a C++ compiler")
        return None
    try:
        return _load(path)
    except OSError as error:
        _warn(str(error))
        return None


def last_error(lib: CDLL) -> str:
    """Return why the last call on this thread failed."""
    return bytes(lib.accelz_last_error()).decode(errors="replace")


def _find() -> Path | None:
    # An editable install has two folders: one of the sources, one of what was built from them.
    found = [path for folder in accelz_cpu.__path__ if (path := Path(folder, LIBRARY)).exists()]
    return found[0] if found else None


def _load(path: Path) -> CDLL:
    lib = ctypes.CDLL(str(path))
    if lib.accelz_abi() != ABI:
        raise OSError(
            f"{path} has interface {lib.accelz_abi()}, expected {ABI}: it was built from different sources"
        )
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def _warn(reason: str) -> None:
    machine.warn(
        f"accelz-cpu runs on plain torch and gloo, which is slower: {reason}. With a C++ compiler and CMake "
        "installed, run: pip install --force-reinstall --no-cache-dir accelz-cpu (pip caches what it built "
        "without them)",
        RuntimeWarning,
        stacklevel=4,
    )
