"""The packages of the working tree made importable and discoverable without pip or a build."""

from __future__ import annotations

import os
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("accelz", "accelz_cpu", "accelz_cuda", "accelz_xpu", "accelz_hpu", "zero")


def assemble(site: Path, wheels: Path | None) -> dict[str, str]:
    """Fill `site` with metadata of our packages and the contents of `wheels`; the environment to run in.

    A distribution needs no more than its sources on the path and a dist-info folder with its entry points.
    """
    for wheel in sorted(wheels.glob("*.whl")) if wheels else []:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    present = [name for name in PACKAGES if (ROOT / name / "pyproject.toml").exists()]
    for name in present:
        _write_metadata(site, ROOT / name / "pyproject.toml")
    sources = [str(ROOT / name / "src") for name in present]
    inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sources, str(ROOT), *inherited])}


def _write_metadata(site: Path, file: Path) -> None:
    project = tomllib.loads(file.read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head)
    lines: list[str] = []
    for group, entries in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
