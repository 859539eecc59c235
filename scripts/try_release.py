"""Tries a release: `python -m scripts.try_release dist`, which scripts/release.py has made.

An empty environment gets torch and what else the packages need at the versions of constraints.txt, and then
the wheels, from the folder alone. There it runs the commands, the README's snippets, the job of `make train`
and the short tests. Before that, twine checks what an index would; the folder gets an SBOM of it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

from scripts.paths import ROOT

TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "trove-classifiers", "wheel")
OUR_OWN = re.compile(r"^accelz\b")
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def needs(wheels: list[Path]) -> list[str]:
    """What the wheels need of others, without extras."""
    found: set[str] = set()
    for wheel in wheels:
        with ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = message_from_bytes(archive.read(name))
        found |= {need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need}
    return sorted(need for need in found if not OUR_OWN.match(need))


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Raises CalledProcessError where the command fails."""
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, check=True, env=_environment())


def _environment() -> dict[str, str]:
    """Without what would show the environment more than its own packages."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}


def install(folder: Path, wheels: list[Path]) -> Path:
    """An empty environment with the wheels. Returns its folder of programs."""
    run(sys.executable, "-m", "venv", folder)
    programs, constraints = folder / "bin", ("-c", ROOT / "constraints.txt")
    pip = (programs / "python", "-m", "pip", "install", "--quiet")
    run(*pip, *constraints, *needs(wheels))
    run(
        *pip, "--no-index", "--find-links", wheels[0].parent, "accelz-zero"
    )  # which brings accelz and accelz-cpu
    run(*pip, "--no-index", "--find-links", wheels[0].parent, *wheels)
    return programs


def use(programs: Path, tests: bool) -> None:
    """The commands, the README, the job of `make train`, the short tests."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run(programs / "accelz", "list", cwd=place)
        run(programs / "zero", "--help", cwd=place)
        (place / "readme.py").write_text(
            "\n".join(_BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
        )
        run(programs / "python", place / "readme.py", cwd=place)
        launch = (programs / "torchrun", "--standalone", "--nproc-per-node", "2")
        run(*launch, ROOT / "examples/train_lm.py", "--steps", "20", "--out", place / "lm", cwd=place)
    if tests:
        run(programs / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *TOOLS)
        run(programs / "python", "-m", "pytest", "-n", "2", "--dist", "loadfile", "--quick")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--no-tests", action="store_true", help="leave out the short tests")
    given = parser.parse_args(arguments)
    wheels = sorted(given.dist.resolve().glob("*.whl"))
    archives = [*wheels, *given.dist.resolve().glob("*.tar.gz")]
    run(sys.executable, "-m", "twine", "check", "--strict", *archives)
    with tempfile.TemporaryDirectory() as folder:
        programs = install(Path(folder, "environment"), wheels)
        sbom = given.dist.resolve() / "sbom.cdx.json"
        cyclonedx = (sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible")
        run(*cyclonedx, "--output-file", sbom, programs / "python")  # before the tests' tools are there
        use(programs, not given.no_tests)
    print("the release can be installed and used")


if __name__ == "__main__":
    main()
