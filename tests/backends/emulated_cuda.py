"""The CUDA kernels on the host: their sources built by the C++ compiler over `host_cuda.h`."""

from __future__ import annotations

import ctypes
import subprocess
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from accelz_cuda import kernels
from accelz_cuda.kernels import EntryPoint
from accelz_cuda.kernels.driver import Driver
from accelz_cuda.kernels.launcher import KernelLauncher

HERE = Path(__file__).parent
COMPILE = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-c"]


def build(folder: Path) -> Path:
    """A library with every kernel, and a driver API over them."""
    on_host = ["-I", str(kernels.FOLDER), "-include", str(HERE / "host_cuda.h"), "-x", "c++"]
    builds = {
        folder / f"{source}.o": [*COMPILE, *on_host, str(kernels.FOLDER / f"{source}.cu")]
        for source in kernels.SOURCES
    }
    builds[folder / "driver.o"] = [*COMPILE, str(HERE / "host_driver.cpp")]
    running = [subprocess.Popen([*command, "-o", str(target)]) for target, command in builds.items()]
    assert [process.wait() for process in running] == [0] * len(running)
    library = folder / "libhost_cuda.so"
    subprocess.run(["g++", "-shared", "-o", str(library), *map(str, builds)], check=True)
    return library


class EmulatedLauncher(KernelLauncher):
    """The package's launcher for tensors of the CPU. `launched`: names of kernels, in order."""

    device_type = "cpu"

    def __init__(self, library: Path) -> None:
        super().__init__()
        self._library = library
        self.calls = ctypes.CDLL(str(library))
        self.launched: list[str] = []

    def launch(self, entry: EntryPoint, device: int, blocks: int, arguments: bytes) -> None:
        self.launched.append(entry.name)
        super().launch(entry, device, blocks, arguments)

    def current_device(self) -> int:
        return -1

    def multiprocessors(self, device: int) -> int:
        return 1

    def _code(self, source: str, device: int) -> bytes:
        return source.encode()

    def _open_driver(self) -> Driver:
        return Driver(str(self._library))

    def _stream(self, device: int) -> int:
        return 0

    def _on(self, device: int) -> AbstractContextManager[object]:
        return nullcontext()
