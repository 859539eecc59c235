"""Compiles CUDA C++ to cubins at first use, by NVRTC, and keeps them on disk.

cuda.bindings finds NVRTC in the wheel nvidia-cuda-nvrtc, which torch's CUDA builds depend on, or in an
installed CUDA toolkit. The sources include no headers of the toolkit, so none have to be found.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelz.ranks import machine
from accelz_cuda import kernels

# No contraction, so that an element gets the same bits in a vector as alone, whatever the alignment.
OPTIONS = ("--std=c++17", "--fmad=false")
_DIGEST_BYTES = 32


class CompilerMissingError(RuntimeError):
    """cuda.bindings or NVRTC is not installed or cannot be loaded."""


class CompilationError(RuntimeError):
    """NVRTC rejected a source; the message contains its log."""


@dataclass(frozen=True)
class Toolchain:
    """NVRTC. bindings: the module cuda.bindings.nvrtc. version: NVRTC's major and minor version."""

    bindings: Any
    version: tuple[int, int]

    def compile(self, source: str, arch: str, *options: str) -> tuple[bytes, str]:
        """Compile `source` (a name in kernels.SOURCES) for `arch`, such as "sm_90"; return cubin and log.

        options: further options of NVRTC. Raises CompilationError.
        """
        return self.compile_text(kernels.source_text(source), arch, f"{source}.cu", *options)

    def compile_text(self, text: str, arch: str, name: str, *options: str) -> tuple[bytes, str]:
        """Like `compile`, for CUDA C++ from elsewhere, which may include the headers here."""
        every = (*OPTIONS, f"--gpu-architecture={arch}", f"--include-path={kernels.FOLDER}", *options)
        program = self._asked("nvrtcCreateProgram", text.encode(), name.encode(), 0, [], [])
        try:
            status, *_ = self.bindings.nvrtcCompileProgram(program, len(every), _encoded(every))
            log = self._output(program, "ProgramLog").rstrip(b"\0\n").decode(errors="replace")
            if int(status):
                raise CompilationError(f"{name} does not compile for {arch}: {status!r}\n{log}")
            return self._output(program, "CUBIN"), log
        finally:
            self.bindings.nvrtcDestroyProgram(program)

    def _output(self, program: Any, what: str) -> bytes:
        buffer = bytearray(self._asked(f"nvrtcGet{what}Size", program))
        self._asked(f"nvrtcGet{what}", program, buffer)
        return bytes(buffer)

    def _asked(self, function: str, *arguments: Any) -> Any:
        """Call a function of NVRTC, and return what it gives besides its status. Raises CompilationError."""
        status, *given = getattr(self.bindings, function)(*arguments)
        if int(status):
            raise CompilationError(f"{function} answers {status!r}")
        return given[0] if given else None


@functools.cache
def toolchain() -> Toolchain:
    """Return this environment's compiler. Raises CompilerMissingError."""
    try:
        bindings = importlib.import_module("cuda.bindings.nvrtc")
        status, major, minor = bindings.nvrtcVersion()
        if int(status):
            raise RuntimeError(f"NVRTC answers {status!r}")
    except Exception as error:  # import errors of several kinds, and whatever the loaders raise
        raise CompilerMissingError(f"{type(error).__name__}: {error}") from error
    return Toolchain(bindings, (major, minor))


def cubin(source: str, arch: str, cache: CubinCache) -> bytes:
    """Return the cubin of `source` for `arch`, from the cache if it is there.

    Raises CompilerMissingError and CompilationError.
    """
    tools = toolchain()
    name = cache_name(source, arch, tools.version)
    return cache.get_or_make(name, lambda: tools.compile(source, arch)[0])


def cache_name(source: str, arch: str, version: tuple[int, int]) -> str:
    """A file name that changes with everything the cubin depends on."""
    parts = [source, arch, repr(version), repr(OPTIONS), kernels.source_text(source)]
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
            machine.warn(
                f"compiled kernels cannot be cached in {self.folder}, so every process compiles its own: "
                f"{error}; set ACCELZ_CACHE_DIR to a writable folder",
                RuntimeWarning,
                stacklevel=2,
            )


def _encoded(options: Sequence[str]) -> list[bytes]:
    return [option.encode() for option in options]
