"""From an entry point to a running kernel: compiled and loaded once, launched on torch's stream."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import torch

from accelz.ranks import machine
from accelz_cuda import compiler, kernels
from accelz_cuda.kernels import EntryPoint
from accelz_cuda.kernels.driver import Driver, DriverError


class KernelLauncher:
    """Loads a source when one of its kernels is first asked for, which must not be during a stream capture.

    If that fails, it warns once and reports kernels as not ready from then on, so the torch references serve.
    """

    device_type = "cuda"

    def __init__(self, cache: compiler.CubinCache | None = None) -> None:
        self._cache = cache or compiler.CubinCache()
        self._driver: Driver | None = None
        self._given_up = False
        self._kernels: dict[tuple[str, int], int | None] = {}  # by entry and device; None: not available
        self._lock = threading.Lock()

    def ready(self, entry: EntryPoint, device: int) -> bool:
        """Whether `entry` can be launched on a device; compiles and loads its source when first asked."""
        try:
            return self._kernels[entry.name, device] is not None
        except KeyError:
            return self._prepare(entry, device)

    def launch(self, entry: EntryPoint, device: int, blocks: int, arguments: bytes) -> None:
        """Start `entry`, which is ready, on torch's current stream of the device. Does not wait.

        Raises DriverError, a RuntimeError, with the kernel's name.
        """
        kernel = self._kernels[entry.name, device]
        assert kernel is not None
        assert self._driver is not None
        with self._on(device):
            self._driver.launch(
                kernel, entry.name, blocks, kernels.THREADS, self._stream(device), device, arguments
            )

    def current_device(self) -> int:
        return torch.cuda.current_device() if torch.cuda.is_available() else 0

    def multiprocessors(self, device: int) -> int:
        return int(torch.cuda.get_device_properties(device).multi_processor_count)

    def _prepare(self, entry: EntryPoint, device: int) -> bool:
        with self._lock:
            if (entry.name, device) not in self._kernels:
                entries = [e for e in kernels.ENTRIES if e.source == entry.source]
                found = {} if self._given_up else self._load(entries, device)
                self._kernels |= {(e.name, device): found.get(e.name) for e in entries}
        return self._kernels[entry.name, device] is not None

    def _load(self, entries: list[EntryPoint], device: int) -> dict[str, int]:
        """Load the kernels of one source and return them by name; on failure, warn and return none."""
        try:
            code = self._code(entries[0].source, device)
            self._driver = self._driver or self._open_driver()
            library = self._driver.load(code)
            return {e.name: self._driver.kernel(library, e.name) for e in entries}
        except compiler.CompilationError as error:
            _warn(
                f"{error}\nEither this NVRTC does not know the GPU, or this is a bug in accelz_cuda: please "
                "report it."
            )
        except (_UnusableError, compiler.CompilerMissingError, DriverError) as error:
            self._given_up = True
            _warn(_what_to_do(error))
        return {}

    def _code(self, source: str, device: int) -> bytes:
        if torch.version.hip:
            raise _UnusableError(f"they are written for CUDA, torch is built for ROCm {torch.version.hip}.")
        if not torch.cuda.is_available():
            raise _UnusableError("there is no GPU.")
        major, minor = torch.cuda.get_device_capability(device)
        return compiler.cubin(source, f"sm_{major}{minor}", self._cache)

    def _open_driver(self) -> Driver:
        return Driver()

    def _stream(self, device: int) -> int:
        # torch.cuda.current_stream would create an object for every launch.
        return torch._C._cuda_getCurrentRawStream(device)

    def _on(self, device: int) -> AbstractContextManager[object]:
        """Make the device torch's current one, unless it is: asking costs less than entering."""
        return nullcontext() if torch.cuda.current_device() == device else torch.cuda.device(device)


class _UnusableError(RuntimeError):
    """The kernels cannot be used here, and there is nothing to be done about it."""


def _what_to_do(error: Exception) -> str:
    if isinstance(error, _UnusableError):
        return str(error)
    major = (torch.version.cuda or "13").split(".")[0]
    if isinstance(error, compiler.CompilerMissingError):
        return f"their compiler is missing ({error}). Install it with: pip install 'accelz-cuda[cu{major}]'"
    return (
        f"the driver cannot load them ({error}). It must be from CUDA 12 or newer, and not from an older "
        f"major version than NVRTC; pip install 'accelz-cuda[cu{major}]' brings the NVRTC that matches torch."
    )


def _warn(reason: str) -> None:
    machine.warn(
        f"torch references are used instead of accelz_cuda's kernels, which is slower: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
