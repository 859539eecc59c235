"""Puts the engine's tests, which `zero check` runs, into the wheel and the source archive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KINDS = {".py", ".json"}


class Tests(BuildHookInterface[Any]):
    """The files are in `tests`: of the source archive, or of the checkout, beside this package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        tests = root / "tests" if (root / "tests").is_dir() else root.parent / "tests"
        place = "tests" if self.target_name == "sdist" else "zero_conformance/tests"
        for name in self.config["tests"]:
            found = sorted((tests / name).rglob("*")) if (tests / name).is_dir() else [tests / name]
            for path in found:
                if path.suffix in KINDS:
                    build_data["force_include"][str(path)] = f"{place}/{path.relative_to(tests).as_posix()}"
