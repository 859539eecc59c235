"""The few calls of the CUDA driver API that loading and launching a kernel take, through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from typing import Any

LIBRARY = "libcuda.so.1"
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has not used the device yet

_SIGNATURES: dict[str, list[Any]] = {
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuLibraryLoadData": [
        POINTER(c_void_p),
        c_char_p,
        c_void_p,
        c_void_p,
        c_uint,
        c_void_p,
        c_void_p,
        c_uint,
    ],
    "cuLibraryGetKernel": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p],
}


class DriverError(RuntimeError):
    """The driver refused a call. The message has the names of the call and of the error."""


class Driver:
    """The driver. Libraries and kernels are plain handles, which belong to the process, not to one device.

    Raises DriverError if there is no driver, or one older than CUDA 12.
    """

    def __init__(self, library: str | None = None) -> None:
        library = library or LIBRARY
        try:
            self._calls = ctypes.CDLL(library)
            for name, arguments in _SIGNATURES.items():
                getattr(self._calls, name).argtypes = arguments
        except (OSError, AttributeError) as error:
            raise DriverError(f"{library} is missing or too old: {error}") from error
        self._launch = self._calls.cuLaunchKernel

    def load(self, cubin: bytes) -> int:
        """Load a cubin as a library, for every device of its architecture. It is never unloaded."""
        library = c_void_p()
        self._check(
            self._calls.cuLibraryLoadData(byref(library), cubin, None, None, 0, None, None, 0),
            "cuLibraryLoadData",
        )
        return library.value or 0

    def kernel(self, library: int, name: str) -> int:
        """Return the kernel `name` of a library."""
        kernel = c_void_p()
        self._check(
            self._calls.cuLibraryGetKernel(byref(kernel), library, name.encode()), f"loading kernel {name}"
        )
        return kernel.value or 0

    def launch(
        self, kernel: int, name: str, blocks: int, threads: int, stream: int, device: int, arguments: bytes
    ) -> None:
        """Start `kernel` on a one-dimensional grid.

        arguments: its only parameter, copied before this returns.
        """
        parameters = (c_char_p * 1)(arguments)
        call = (kernel, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, None)
        error = self._launch(*call)
        if error == _INVALID_CONTEXT:
            self._enter(device)
            error = self._launch(*call)
        if error:
            self._check(error, f"launching kernel {name}")

    def _enter(self, device: int) -> None:
        """Make the context that torch uses on `device` current in this thread."""
        handle, context = c_int(), c_void_p()
        self._check(self._calls.cuDeviceGet(byref(handle), device), "cuDeviceGet")
        self._check(self._calls.cuDevicePrimaryCtxRetain(byref(context), handle), "cuDevicePrimaryCtxRetain")
        self._check(self._calls.cuCtxSetCurrent(context), "cuCtxSetCurrent")

    def _check(self, error: int, what: str) -> None:
        if error:
            name = c_char_p()
            self._calls.cuGetErrorName(error, byref(name))
            known = name.value.decode() if name.value else "unknown error"
            raise DriverError(f"{what} failed: {known} ({error})")
