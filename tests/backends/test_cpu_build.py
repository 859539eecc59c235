"""Installing accelz-cpu: one wheel for every Python, and a plain one where there is no compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest

from accelz_cpu import native

pytestmark = pytest.mark.slow  # compiles

PACKAGE = Path(__file__).parents[2] / "accelz_cpu"
SECONDS = 200


def wheel(folder: Path, **environment: str) -> Path:
    """Build one from a copy of the sources, with the tools of this environment; what is compiled is compiled
    without optimization, which takes most of the time."""
    pytest.importorskip("scikit_build_core")
    sources = shutil.copytree(PACKAGE, folder / "sources")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(folder)]
    command += ["--config-settings", "cmake.build-type=Debug"]
    done = subprocess.run(
        [*command, str(sources)],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (built,) = folder.glob("*.whl")
    return built


def test_without_a_compiler_the_package_is_plain_python(tmp_path: Path) -> None:
    built = wheel(tmp_path, CXX="/bin/false")
    assert built.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(built).namelist() if name.endswith(".so")]
    program = (
        "import warnings, sys; warnings.simplefilter('always')\n"
        "from accelz_cpu.accelerator import build\n"
        "first, second = build(), build()\n"
        "print(first.kernels.origin('adamw'), type(first.collectives).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", _without_site(built, tmp_path) + program],
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.stdout.split() == ["accelz_cpu.kernels.CpuKernels", "GlooLanes"], done.stderr
    assert done.stderr.count("RuntimeWarning") == 1
    assert "runs on plain torch and gloo" in done.stderr


def _without_site(built: Path, folder: Path) -> str:
    """Code that puts the wheel's content before everything else that can be imported here."""
    target = folder / "unpacked"
    zipfile.ZipFile(built).extractall(target)
    return f"import sys; sys.path[:0] = {[str(target), *sys.path]!r}\n"


@pytest.mark.skipif(
    sys.platform != "linux" or not (shutil.which("cmake") and shutil.which("c++")),
    reason="needs Linux, cmake and a C++ compiler",
)
def test_the_wheel_is_tied_to_no_version_of_python_or_torch(tmp_path: Path) -> None:
    built = wheel(tmp_path)
    assert "-py3-none-linux_" in built.name
    with zipfile.ZipFile(built) as content:
        content.extract(f"accelz_cpu/{native.LIBRARY}", tmp_path)
    needed = subprocess.run(
        ["ldd", str(tmp_path / "accelz_cpu" / native.LIBRARY)], check=True, capture_output=True, text=True
    ).stdout
    libraries = [line.split()[0] for line in needed.splitlines()]  # the rest of a line is an address
    assert any("libc.so" in library for library in libraries)
    for name in ("torch", "c10", "python", "libstdc++", "libgomp"):
        assert not [library for library in libraries if name in library]


def test_a_library_of_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.library() is None:
        pytest.skip("the native library was not built here")
    monkeypatch.setattr(native, "ABI", native.ABI + 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert native.library.__wrapped__() is None
    (warning,) = caught
    assert f"has interface {native.ABI - 1}, expected {native.ABI}" in str(warning.message)
