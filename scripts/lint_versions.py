"""Fail if a package has another version than the file VERSION, or takes others of it than that version's.

Every package is built by itself, from its own folder, so each pyproject.toml repeats the version, and the
range of versions that it works with. `python scripts/lint_versions.py --write` puts VERSION into all of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "VERSION"
OWN = re.compile(r'^version = "(?P<value>[^"]*)"$', re.MULTILINE)
TAKEN = re.compile(r'"accelz(?:-\w+)?(?P<value>[<>=!~][^"]*)"')


def packages(root: Path) -> list[Path]:
    """The pyproject.toml of each package."""
    return sorted([*root.glob("*/pyproject.toml"), *root.glob("examples/*/pyproject.toml")])


def wanted(root: Path) -> dict[re.Pattern[str], str]:
    """What each pattern has to find: the version, and the range up to the next minor one."""
    version = (root / SOURCE).read_text(encoding="utf-8").strip()
    major, minor = version.split(".")[:2]
    return {OWN: version, TAKEN: f">={major}.{minor},<{major}.{int(minor) + 1}"}


def problems(root: Path) -> Iterator[str]:
    for path in packages(root):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(root)
        if not OWN.search(text):
            yield f"{name}: has no version"
        for pattern, value in wanted(root).items():
            found = {match["value"] for match in pattern.finditer(text)} - {value}
            yield from (f"{name}: {other!r} is to be {value!r}, by {SOURCE}" for other in sorted(found))


def write(root: Path) -> None:
    for path in packages(root):
        text = path.read_text(encoding="utf-8")
        for pattern, value in wanted(root).items():
            text = pattern.sub(lambda match: match[0].replace(match["value"], value), text)  # noqa: B023
        path.write_text(text, encoding="utf-8")


def main() -> int:
    if "--write" in sys.argv[1:]:
        write(ROOT)
    found = list(problems(ROOT))
    print("\n".join(found) or "version lint: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
