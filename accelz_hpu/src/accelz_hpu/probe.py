"""Probes for a Gaudi that the installed software can drive, without touching the device or the software.

The vendor's package is looked for but not imported, the torch it was built for is read from its files, and
devices are found in the kernel's accel class, so a process forked later can still acquire one.
"""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path

from accelz import Probe

ROOT = Path("/")
HABANA = "0x1da3"
INSTALL = "pip install 'accelz-hpu[habana]' with the vendor's package index"


def probe() -> Probe:
    bridge = bridge_folder()
    if bridge is None:
        return Probe(False, f"habana_frameworks is not installed: {INSTALL}")
    if misfit := _torch_misfit(bridge):
        return Probe(False, misfit)
    devices = gaudi_devices()
    if not devices:
        return Probe(False, f"no Gaudi: no device in /sys/class/accel has vendor {HABANA}")
    nodes = [name for name in devices if (ROOT / "dev/accel" / name).exists()]
    if not nodes:
        return Probe(
            False,
            f"{devices[0]} is in the machine but /dev/accel/{devices[0]} is not here: start the container "
            "with the habana runtime and HABANA_VISIBLE_DEVICES",
        )
    return Probe(True, f"{len(nodes)} Gaudi device{'s' if len(nodes) > 1 else ''}")


def bridge_folder() -> Path | None:
    """The folder of habana_frameworks.torch, or None if it is not installed. Imports neither package."""
    spec = find_spec("habana_frameworks")
    folders = [Path(p, "torch") for p in (spec.submodule_search_locations or ())] if spec else []
    return next((folder for folder in folders if (folder / "__init__.py").exists()), None)


def gaudi_devices() -> list[str]:
    """The names of Gaudi devices, such as accel0.

    The accel class has other vendors' devices too, so the vendor decides. If a container hides the class, the
    device nodes that the container was given decide.
    """
    vendors = sorted(ROOT.glob("sys/class/accel/accel*/device/vendor"))
    if vendors:
        return [path.parent.parent.name for path in vendors if path.read_text().strip() == HABANA]
    return sorted(path.name for path in ROOT.glob("dev/accel/accel[0-9]*"))


def is_first_generation() -> bool:
    """Whether the devices are first-generation Gaudi, by the PCI identifiers in the kernel's driver."""
    kinds = [path.read_text().strip() for path in ROOT.glob("sys/class/accel/accel*/device/device")]
    return any(kind in ("0x1000", "0x1010") for kind in kinds)


def _torch_misfit(bridge: Path) -> str:
    """Why the bridge would refuse the installed torch; "" if it fits. The bridge asserts major.minor."""
    required, spec = bridge / "required_version.txt", find_spec("torch")
    if not required.exists() or spec is None or spec.origin is None:
        return ""
    built_for = required.read_text().strip()
    here = str(runpy.run_path(str(Path(spec.origin).with_name("version.py")))["__version__"])
    if here.split(".")[:2] == built_for.split(".")[:2]:
        return ""
    return f"habana_frameworks is built for torch {built_for} and torch is {here}: install the two that match"
