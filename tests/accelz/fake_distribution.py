"""Real entry points without pip: a dist-info folder and a module in a directory on sys.path."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

_numbers = itertools.count()
ROOT = Path(__file__).resolve().parents[2]

GOOD = """
from accelz.hooks import BackendDescriptor, Probe, hookimpl

def load():
    from accelz_cpu.accelerator import build
    accelerator = build()
    accelerator.name = {name!r}
    return accelerator

@hookimpl
def accelz_backend():
    return BackendDescriptor({name!r}, {api}, {priority}, lambda: Probe({available}, {reason!r}), load)
"""


def good(
    name: str, priority: int = 10, available: bool = True, reason: str = "a double of the cpu", api: int = 2
) -> str:
    """Source of a sound backend that computes on the CPU under another name."""
    return GOOD.format(name=name, api=api, priority=priority, available=available, reason=reason)


def install(folder: Path, name: str, source: str, distribution: str | None = None) -> None:
    """Put a backend called `name` into `folder`: an entry point and the module that it names."""
    distribution = distribution or f"accelz-{name}"
    module = f"{distribution.replace('-', '_')}_plugin_{next(_numbers)}"  # never an earlier test's module
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[accelz.backends]\n{name} = {module}\n")
    (folder / f"{module}.py").write_text(textwrap.dedent(source))


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """The process environment with `folder` and the repository importable, and no choice of a device."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ACCELZ_")}
    return {**kept, "PYTHONPATH": importable(folder), **variables}


def importable(*folders: str | Path) -> str:
    """PYTHONPATH with these folders and the repository before what it has: that is where our packages are
    under device-check, which installs none."""
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join([*map(str, folders), str(ROOT), *inherited])


def python(folder: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter that sees the distributions in `folder`."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment(folder, **variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def check(folder: Path, *options: str, name: str = "liar") -> tuple[int, dict[str, Any]]:
    """Exit code and answer of `accelz check`, on a backend that is installed in `folder`."""
    command = [sys.executable, "-m", "accelz.cli", "check", name, "--json", *options]
    done = subprocess.run(
        command, env=environment(folder), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)
