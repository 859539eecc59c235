"""Probes for a GPU that the installed torch can drive, without touching the GPU.

torch is not imported and no context is opened, so that processes forked later can still use the device:
torch's build is read from its version file, and devices are counted by the driver's management library
(NVML) or, on ROCm, by the kernel's topology.
"""

from __future__ import annotations

import ctypes
import os
import re
import runpy
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from accelz import Probe

KFD = Path("/dev/kfd")
TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
CUDA_VARIABLES = ("CUDA_VISIBLE_DEVICES",)
HIP_VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""The variables that hide GPUs from torch, each by itself."""


def probe() -> Probe:
    build = torch_build()
    if build.get("hip"):
        return _answer(_rocm_devices(), HIP_VARIABLES, f"ROCm {build['hip']}")
    if build.get("cuda"):
        return _answer(_nvidia_devices(), CUDA_VARIABLES, f"CUDA {build['cuda']}")
    return Probe(False, f"torch {build.get('__version__', '?')} is built without CUDA and ROCm")


def torch_build() -> dict[str, Any]:
    """The names in torch/version.py: `cuda` and `hip` are version strings or None. Imports nothing."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    version = Path(spec.origin).with_name("version.py")
    return runpy.run_path(str(version)) if version.exists() else {}


def _answer(devices: int | str, variables: tuple[str, ...], build: str) -> Probe:
    if isinstance(devices, str):
        return Probe(False, devices)
    if devices == 0:
        return Probe(False, f"no GPU: the driver of {build} sees none")
    for variable in variables:
        if not _seen(os.environ.get(variable, "0"), devices):
            return Probe(False, f"{variable} hides all {devices} GPUs; unset it to use them")
    return Probe(True, f"{devices} GPU{'s' if devices > 1 else ''}, {build}")


def _seen(value: str, devices: int) -> bool:
    """Whether torch sees any of `devices` GPUs if a variable has this value: whether the list that
    torch.cuda._parse_visible_devices makes of it is not empty, and its first GPU exists.

    The list ends at the first element that is neither a number nor an identifier, or is below 0; an element
    that occurs twice empties it.
    """
    elements = [element.strip() for element in value.split(",")]
    if elements[0].startswith(("GPU-", "MIG-")):
        kept = list(takewhile(lambda element: element.startswith(elements[0][:4]), elements))
        return len(set(kept)) == len(kept)
    numbers = list(takewhile(lambda number: number >= 0, map(_leading_number, elements)))
    return bool(numbers) and len(set(numbers)) == len(numbers) and numbers[0] < devices


def _leading_number(text: str) -> int:
    """The leading number as strtoul reads it ("1gpu" is 1), or -1."""
    found = re.match(r"[+-]?\d+", text)
    return int(found[0]) if found else -1


def _nvidia_devices() -> int | str:
    """Return how many GPUs the driver has, or why that is not known."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "no GPU driver: libnvidia-ml.so.1 is not on this machine"
    if code := library.nvmlInit_v2():
        return f"the GPU driver does not answer (NVML error {code})"
    count = ctypes.c_uint()
    code = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    library.nvmlShutdown()
    return f"the GPU driver does not say how many GPUs there are (NVML error {code})" if code else count.value


def _rocm_devices() -> int | str:
    if not KFD.exists():
        return f"no GPU driver: {KFD} is not on this machine"
    return sum(1 for node in TOPOLOGY.glob("*/gpu_id") if node.read_text().strip() not in ("", "0"))
