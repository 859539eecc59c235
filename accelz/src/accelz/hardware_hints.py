"""Traces in the file system of devices for which no backend is installed.

They are only hints for a warning: no device library is imported and no device opened, and the decision is
always the backend's own probe's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Hint:
    backend: str
    distribution: str
    pattern: str  # a glob below the root directory
    content: str = ""  # text the matched file must contain; "" if it only has to exist


HINTS = (
    Hint("cuda", "accelz-cuda", "dev/nvidia[0-9]*"),
    Hint("cuda", "accelz-cuda", "dev/kfd"),
    Hint("hpu", "accelz-hpu", "sys/class/accel/accel*/device/vendor", "0x1da3"),
    Hint("xpu", "accelz-xpu", "sys/class/drm/renderD*/device/vendor", "0x8086"),
)


def missing_backends(installed: set[str], root: Path = Path("/")) -> list[Hint]:
    """Return the hints of devices that seem to be present and whose backend is not among `installed`."""
    found: dict[str, Hint] = {}
    for hint in HINTS:
        if hint.backend not in installed and hint.backend not in found and _present(hint, root):
            found[hint.backend] = hint
    return list(found.values())


def _present(hint: Hint, root: Path) -> bool:
    return any(not hint.content or hint.content in _text(path) for path in root.glob(hint.pattern))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
