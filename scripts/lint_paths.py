"""Fail if stored results or the documentation carry absolute paths: those of the machine that made them.

Run as `python -m scripts.lint_paths`, in the project's root.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.paths import ROOT, absolute, relative

PLACES = ("README.md", "*/README.md", "examples/*/*.md", "docs/**/*", "benchmarks/results/**/*")
SUFFIXES = {".json", ".md", ".svg", ".txt"}


def problems(path: Path) -> Iterator[str]:
    """What is wrong with a file. Of JSON, the texts are looked at, in which line breaks are no letters."""
    text = path.read_text(encoding="utf-8")
    lines = _texts(json.loads(text)) if path.suffix == ".json" else enumerate(text.splitlines(), 1)
    for where, line in lines:
        yield from (f"{relative(str(path))}:{where}: an absolute path, {found}" for found in absolute(line))


def _texts(value: Any, where: str = "") -> Iterator[tuple[str | int, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield where, key
            yield from _texts(each, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _texts(each, f"{where}[{index}]")


def files() -> Iterator[Path]:
    for pattern in PLACES:
        yield from (path for path in sorted(ROOT.glob(pattern)) if path.suffix in SUFFIXES)


def main() -> int:
    found = [problem for path in files() for problem in problems(path)]
    print("\n".join(found) or "path lint: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
