"""Probes for an Intel GPU that the installed torch can drive, without touching the GPU or torch.

torch's build is read from its version file and devices from the kernel's render nodes: nothing is imported
and no driver is opened, so processes forked later can still use the device.
"""

from __future__ import annotations

import os
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelz import Probe

ROOT = Path("/")
INTEL = "0x8086"
SELECTORS = ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")
"""Variables that tell the driver and the SYCL runtime to hide devices."""


def probe() -> Probe:
    build = torch_build()
    if not build:
        return Probe(False, "torch is not installed: install its build for Intel GPUs")
    if not build.get("xpu"):
        version = build.get("__version__", "?")
        return Probe(False, f"torch {version} is built without XPU; install torch's build for Intel GPUs")
    nodes = render_nodes()
    if not nodes:
        return Probe(False, f"no Intel GPU: no render node in /sys/class/drm has vendor {INTEL}")
    usable = [node for node in nodes if os.access(ROOT / "dev/dri" / node, os.R_OK | os.W_OK)]
    if not usable:
        return Probe(
            False,
            f"no access to /dev/dri/{nodes[0]}: add the user to its group (usually render), or in a "
            "container pass --device /dev/dri",
        )
    return Probe(True, f"{', '.join(usable)}, torch {build['__version__']}{selection()}")


def torch_build() -> dict[str, Any]:
    """The names in torch/version.py; `xpu` is a version string or None. Empty if torch is not installed."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    version = Path(spec.origin).with_name("version.py")
    return runpy.run_path(str(version)) if version.exists() else {}


def render_nodes() -> list[str]:
    """Names of the render nodes of Intel GPUs, integrated ones included."""
    vendors = sorted(ROOT.glob("sys/class/drm/renderD*/device/vendor"))
    return [path.parent.parent.name for path in vendors if path.read_text().strip() == INTEL]


def selection() -> str:
    """Say for a message what the environment sets about the choice of devices; "" if nothing.

    An empty ZE_AFFINITY_MASK hides nothing: the driver takes it as unset.
    """
    values = {name: os.environ.get(name, "") for name in SELECTORS}
    return "".join(f", {name}={value}" for name, value in values.items() if value)
