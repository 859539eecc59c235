"""The native library's own tests, under the sanitizers that the toolchain has.

Ranks run as threads of one process there: the thread sanitizer sees no races between processes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # compiles

SOURCES = Path(__file__).parents[3] / "accelz_cpu"
SECONDS = 240

needs_toolchain = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None, reason="needs cmake and a C++ compiler"
)


@needs_toolchain
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_native_tests_are_clean(tmp_path: Path, sanitizer: str) -> None:
    if not _works(tmp_path, sanitizer):
        pytest.skip(f"this toolchain does not run programs with -fsanitize={sanitizer}")
    build = tmp_path / "build"
    options = ["-DACCELZ_TESTS=ON", f"-DACCELZ_SANITIZER={sanitizer}"]
    _run("cmake", "-S", str(SOURCES), "-B", str(build), *options)
    _run("cmake", "--build", str(build), "--parallel", "2")
    _run(str(build / "native_tests"))


def _works(folder: Path, sanitizer: str) -> bool:
    source, program = folder / "empty.cpp", folder / "empty"
    source.write_text("int main() { return 0; }\n")
    compiled = _output("c++", f"-fsanitize={sanitizer}", str(source), "-o", str(program))
    return compiled.returncode == 0 and _output(str(program)).returncode == 0


def _run(*command: str) -> None:
    done = _output(*command)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout[-8000:]}"


def _output(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
    )
