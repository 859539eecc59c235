"""A machine whose device is a double: a folder with the package, a /sys and a /dev, to run scripts in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
IGNORED = ("ACCELZ_", "PT_HPU_", "HABANA_", "HLS_", "ZE_", "ONEAPI_")

SITE = """
import accelz_{name}.probe as probe
from pathlib import Path
probe.ROOT = Path({root!r})
{more}
"""


class Machine:
    """name: hpu or xpu. Processes see the double's package, and its probe the files below `root`."""

    def __init__(self, folder: Path, name: str, more: str = "") -> None:
        self.site, self.root = folder / "site", folder / "root"
        shutil.copytree(HERE / name, self.site)
        shutil.copy(HERE / "stand_in.py", self.site)
        self.root.mkdir()
        (self.site / "sitecustomize.py").write_text(SITE.format(name=name, root=str(self.root), more=more))

    def write(self, path: str, text: str = "") -> None:
        """Put a file below the root."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(IGNORED)}
        path = os.pathsep.join((str(self.site), str(ROOT)))
        return subprocess.run(
            [sys.executable, *command],
            env={**kept, "PYTHONPATH": path, **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def answer(self, script: str, **variables: str) -> Any:
        """Run a script that ends in `answer(value)`, and return the value."""
        head = "import json\ndef answer(value): print(json.dumps(value))\n"
        done = self.run("-c", head + textwrap.dedent(script), **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


def gaudi(folder: Path, modules: int = 8) -> Machine:
    """A server with Gaudi devices and the bridge for the torch that is installed."""
    machine = Machine(folder, "hpu")
    required = machine.site / "habana_frameworks/torch/required_version.txt"
    required.write_text(torch.__version__)
    for number in range(modules):
        machine.write(f"sys/class/accel/accel{number}/device/vendor", "0x1da3\n")
        machine.write(f"sys/class/accel/accel{number}/device/device", "0x1020\n")
        machine.write(f"dev/accel/accel{number}")
    (machine.root / "held").mkdir()
    return machine


def gaudi_environment(machine: Machine, modules: int = 8) -> dict[str, str]:
    """What the double is told in place of asking a driver."""
    listed = ",".join(str(n) for n in range(modules))
    return {"DOUBLE_MODULES": listed, "DOUBLE_HELD": str(machine.root / "held")}


XPU_BUILD = "probe.torch_build = lambda: {'__version__': '2.13.0+xpu', 'xpu': '20250301'}"


def intel_gpu(folder: Path) -> Machine:
    """A machine with an Intel GPU and a torch that is built for it."""
    machine = Machine(folder, "xpu", XPU_BUILD)
    machine.write("sys/class/drm/renderD128/device/vendor", "0x8086\n")
    machine.write("dev/dri/renderD128")
    return machine
