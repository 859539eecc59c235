"""Making the packages of the working tree importable and discoverable without pip or a build."""

from __future__ import annotations

import os
import shutil
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("accelz", "accelz_cpu", "accelz_cuda", "accelz_xpu", "accelz_hpu", "zero")
NATIVE = "accelz_cpu"
"""The package that is copied, because a library goes beside its sources."""


class WheelError(Exception):
    """A wheel must not be used, for the reason that the message gives."""


def assemble(site: Path, wheels: Path | None) -> dict[str, str]:
    """Fill `site` with our packages' metadata and the contents of `wheels`; returns the environment to use.

    A distribution needs no more than its sources on the path and a dist-info folder with its entry points.
    Raises WheelError if a wheel holds one of our packages, since the working tree is what is to be run.
    """
    site.mkdir(parents=True, exist_ok=True)
    present = [name for name in PACKAGES if (ROOT / name / "pyproject.toml").exists()]
    projects = [
        tomllib.loads((ROOT / name / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for name in present
    ]
    ours = {project["name"].replace("-", "_") for project in projects}
    for wheel in sorted(wheels.glob("*.whl")) if wheels else []:
        if wheel.name.split("-")[0].lower() in ours:
            raise WheelError(f"{wheel} is a package of the working tree, which is used as it is: remove it")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for project in projects:
        _write_metadata(site, project)
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / NATIVE / "src" / NATIVE, site / NATIVE, ignore=skipped, dirs_exist_ok=True)
    sources = [str(ROOT / name / "src") for name in present]
    inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sources, str(ROOT), *inherited])}


def _write_metadata(site: Path, project: dict[str, Any]) -> None:
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head, encoding="utf-8")
    lines: list[str] = []
    for group, entries in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
