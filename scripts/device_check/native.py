"""The native library of accelz_cpu, in which optimizers of state on the host run, whatever the device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

LIBRARY = "libaccelz_cpu.so"
BUILD_SECONDS = 180


def provide(package: Path, sources: Path, build: Path, given: Path | None) -> str:
    """Copy the library into the folder `package`; returns where it came from, or why there is none.

    given: a library to use. Without it, the one installed in this Python is used, or else one is built from
    `sources` in `build`, if CMake and a C++ compiler are found.
    """
    found, origin = given, f"{given}"
    if found is None:
        found, origin = _installed(), "installed"
    if found is None:
        found, origin = _built(sources, build)
    if found is not None:
        shutil.copy(found, package / LIBRARY)
    return origin


def _installed() -> Path | None:
    places = [Path(entry, "accelz_cpu", LIBRARY) for entry in sys.path]
    return next((place for place in places if place.exists()), None)


def _built(sources: Path, build: Path) -> tuple[Path | None, str]:
    if shutil.which("cmake") is None:
        return None, "none: CMake is not on this machine"
    jobs = str(os.cpu_count() or 1)
    for command in (
        ["cmake", "-S", str(sources), "-B", str(build)],
        ["cmake", "--build", str(build), "--parallel", jobs, "--target", "accelz_cpu"],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            return None, f"none: {' '.join(command[:2])} took over {BUILD_SECONDS} s"
        if done.returncode:
            return (
                None,
                f"none: {' '.join(command[:2])} failed: {(done.stderr or done.stdout).strip()[-500:]}",
            )
    return build / LIBRARY, "built here"
