"""Paths of one machine in texts for all: found, and made relative to the project."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_ABSOLUTE = re.compile(r"(?<![\w.~:/<>…-])/(?:[\w.+@-]+/)+[\w.+@-]*")
_OF_EVERY_MACHINE = ("/dev/", "/proc/", "/sys/", "/home/you/")
_PACKAGES = ("/site-packages/", "/dist-packages/")


def absolute(text: str) -> list[str]:
    """The absolute paths in a text, except those that mean the same on every machine, or nothing on any."""
    return [path for path in _ABSOLUTE.findall(text) if not path.startswith(_OF_EVERY_MACHINE)]


def relative(text: str, root: Path = ROOT) -> str:
    """The text with every absolute path as its place in the project or among packages; else its last name."""
    return _ABSOLUTE.sub(lambda found: _place(found[0], root), text)


def all_relative(value: Any, root: Path = ROOT) -> Any:
    """The same for every text in a JSON value."""
    if isinstance(value, str):
        return relative(value, root)
    if isinstance(value, dict):
        return {all_relative(key, root): all_relative(each, root) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [all_relative(each, root) for each in value]
    return relative(str(value), root) if isinstance(value, Path) else value


def _place(path: str, root: Path) -> str:
    if path.startswith(_OF_EVERY_MACHINE):
        return path
    if path.startswith(f"{root}/"):
        return path.removeprefix(f"{root}/") or "."
    for packages in _PACKAGES:
        if packages in path:
            return path.partition(packages)[2]
    return f"…/{path.rstrip('/').rpartition('/')[2]}"
