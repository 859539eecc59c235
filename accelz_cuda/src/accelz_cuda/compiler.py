"""Compiles CUDA C++ to cubins at first use, by NVRTC through cuda.core, and keeps them on disk.

cuda.core finds NVRTC in the wheel nvidia-cuda-nvrtc, which torch's CUDA builds depend on, or in an installed
CUDA toolkit. The sources include no headers of the toolkit, so none have to be found.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelz_cuda import kernels

OPTIONS: dict[str, Any] = {
    "std": "c++17",
    # No contraction, so that an element gets the same bits in a vector as alone, whatever the alignment.
    "fma": False,
}
_DIGEST_BYTES = 32


class CompilerMissingError(RuntimeError):
    """cuda.core or NVRTC is not installed or cannot be loaded."""


class CompilationError(RuntimeError):
    """NVRTC rejected a source; the message contains its log."""


@dataclass(frozen=True)
class Toolchain:
    """cuda.core and the NVRTC behind it. version: NVRTC's major and minor version."""

    core: Any
    version: tuple[int, int]

    def compile(self, source: str, arch: str, ptxas_options: list[str] | None = None) -> tuple[bytes, str]:
        """Compile `source` (a name in kernels.SOURCES) for `arch`, such as "sm_90"; return cubin and log.

        Raises CompilationError.
        """
        return self.compile_text(kernels.source_text(source), arch, f"{source}.cu", ptxas_options)

    def compile_text(
        self, text: str, arch: str, name: str, ptxas_options: list[str] | None = None
    ) -> tuple[bytes, str]:
        """Like `compile`, for CUDA C++ from elsewhere, which may include the headers here."""
        log = io.StringIO()
        try:
            options = self.core.ProgramOptions(
                name=name, arch=arch, include_path=str(kernels.FOLDER), ptxas_options=ptxas_options, **OPTIONS
            )
            code = self.core.Program(text, "c++", options).compile("cubin", logs=log)
        except Exception as error:
            raise CompilationError(f"{name} does not compile for {arch}: {error}") from error
        return bytes(code.code), log.getvalue()


@functools.cache
def toolchain() -> Toolchain:
    """Return this environment's compiler. Raises CompilerMissingError."""
    try:
        core = importlib.import_module("cuda.core")
        if not hasattr(core, "Program"):  # before cuda-core 0.5
            core = importlib.import_module("cuda.core.experimental")
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        status, major, minor = nvrtc.nvrtcVersion()
        if int(status):
            raise RuntimeError(f"NVRTC answers {status!r}")
    except Exception as error:  # import errors of several kinds, and whatever the loaders raise
        raise CompilerMissingError(f"{type(error).__name__}: {error}") from error
    return Toolchain(core, (major, minor))


def cubin(source: str, arch: str, cache: CubinCache) -> bytes:
    """Return the cubin of `source` for `arch`, from the cache if it is there.

    Raises CompilerMissingError and CompilationError.
    """
    tools = toolchain()
    name = cache_name(source, arch, tools.version)
    return cache.get_or_make(name, lambda: tools.compile(source, arch)[0])


def cache_name(source: str, arch: str, version: tuple[int, int]) -> str:
    """A file name that changes with everything the cubin depends on."""
    parts = [source, arch, repr(version), repr(sorted(OPTIONS.items())), kernels.source_text(source)]
    parts += [text for header in kernels.header_texts().items() for text in header]
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return f"{source}-{arch}-{digest.hexdigest()[:32]}.cubin"


def cache_folder() -> Path:
    """ACCELZ_CACHE_DIR, else accelz in XDG_CACHE_HOME, else ~/.cache/accelz."""
    own, shared = os.environ.get("ACCELZ_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "accelz"


class CubinCache:
    """A folder of files, each of which holds a SHA-256 digest and the content it is the digest of.

    Many processes may read and write at once: files appear whole, by a rename, and one that does not match
    its digest is made again. If the folder cannot be written, there is one warning, and nothing is kept.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._warned = False

    @property
    def folder(self) -> Path:
        return cache_folder() / "cuda" if self._folder is None else self._folder

    def get_or_make(self, name: str, make: Callable[[], bytes]) -> bytes:
        """Return the content of `name`, or else what `make` returns, which is kept for the next time."""
        found = self._read(name)
        if found is not None:
            return found
        made = make()
        try:
            self._write(name, made)
        except OSError as error:
            self._warn(error)
        return made

    def _read(self, name: str) -> bytes | None:
        try:
            data = (self.folder / name).read_bytes()
        except OSError:
            return None
        digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        return content if hashlib.sha256(content).digest() == digest else None

    def _write(self, name: str, content: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=f".{name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(temporary, self.folder / name)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"compiled kernels cannot be cached in {self.folder}, so every process compiles its own: "
                f"{error}; set ACCELZ_CACHE_DIR to a writable folder",
                RuntimeWarning,
                stacklevel=2,
            )
