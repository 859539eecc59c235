"""Fail if the tests are not where one looks for them.

The folders of tests/zero are rooms of zero; what tests share is in modules that are no tests, so no test
imports another; and no file is longer than MOST_LINES. Tests of zero know no device's name but the host's:
they run on any backend, what they need of one is a fixture of tests/zero/conftest.py, and what they import of
tests goes with them into zero's wheel.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from scripts.lint_devices import BACKENDS, DEVICE_MODULES, DEVICE_NAMES

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
MOST_LINES = 500
SHORT = ("zero", "sim", "accelz", "backends")  # folders of tests whose files are that short


def strangers(tests: Path, rooms: set[str]) -> Iterator[str]:
    """Folders of tests that are no rooms, and tests in no folder."""
    for path in sorted(tests.iterdir()):
        if any(path.rglob("*.py")) and path.name not in {*rooms, "helpers"}:
            yield f"tests/zero/{path.name} is not called after a room of zero"
        elif path.match("test_*.py"):
            yield f"tests/zero/{path.name} is in no room's folder"


def borrowed(path: Path) -> Iterator[str]:
    """What a file imports from tests."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests."):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            tests = {t[0] for name in names if (t := re.match(r"tests\.(\w+\.)*?test_\w+", name))}
            yield from (f"{path.name} imports the test {test}" for test in sorted(tests))


def named_devices(path: Path) -> Iterator[str]:
    """Devices, other than the host, that a file names, and backends that it imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Constant(value=str(text)) if text.split(":")[0] in DEVICE_NAMES - {"cpu"}:
                yield f"{path.name}:{node.lineno} names the device {text!r}: ask for an ability"
            case ast.Attribute(value=ast.Name("torch"), attr=name) if name in DEVICE_MODULES:
                yield f"{path.name}:{node.lineno} uses torch.{name}: go through accelz"
            case ast.ImportFrom(module=str(name)) | ast.alias(name=name) if name.split(".")[0] in BACKENDS:
                yield f"{path.name}:{node.lineno} imports {name}: see tests/simulated.py"


def shipped() -> list[str]:
    """Files and folders of tests that are in zero's wheel."""
    project = tomllib.loads((ROOT / "zero" / "pyproject.toml").read_text())
    return list(project["tool"]["hatch"]["build"]["hooks"]["custom"]["tests"])


def left_behind(path: Path, shipped: list[str]) -> Iterator[str]:
    """What a file imports from tests that does not go with it into the wheel."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tests":
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                place = name.removeprefix("tests.").replace(".", "/")
                if not any(f"{place}/".startswith(f"{each.removesuffix('.py')}/") for each in shipped):
                    yield f"{path.name} imports {name}, which zero/pyproject.toml does not name"


def too_long(path: Path) -> Iterator[str]:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > MOST_LINES:
        yield f"{path.name} has {lines} lines; the most is {MOST_LINES}"


def main() -> int:
    rooms = {path.stem for path in (ROOT / "zero/src/zero").iterdir()}
    found = list(strangers(TESTS / "zero", rooms))
    for path in sorted(TESTS.rglob("*.py")):
        found += [*borrowed(path), *too_long(path)]
    for path in (TESTS / "simulated.py", *sorted((TESTS / "zero").rglob("*.py"))):
        found += [*named_devices(path), *left_behind(path, shipped())]
    print("\n".join(found) or "test lint: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
