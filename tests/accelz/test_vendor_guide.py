"""The vendor guide, to the letter: its files are written and its commands run, on the simulated device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import accelz
from accelz.discovery import installed

from . import forked
from .fake_distribution import environment
from .test_public_face import OPERATIONS

pytestmark = pytest.mark.slow  # starts programs

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs/vendor-guide.md").read_text()
WHOLE_KIT = "accelz check acme\n"  # the same package passes it in test_new.py, derived from torch.sim
PIP = """
set -e
pip() {  # into a folder of its own, without an index
    python -m pip install -q --no-index --no-build-isolation --no-deps --disable-pip-version-check \\
        --target "$SITE" "${@: -1}"
}
"""


@pytest.fixture
def vendor(tmp_path: Path) -> Path:
    if not installed("sim"):
        pytest.skip("accelz-sim is not installed: see examples/sim_backend/README.md")
    return tmp_path


def _bash(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", PIP + script],
        env=environment(folder) | _variables(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def _variables(folder: Path) -> dict[str, str]:
    site, source = folder / "site", folder / "accelz_acme/src"  # the source comes first: `pip install -e`
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"PYTHONPATH": f"{source}:{site}", "SITE": str(site), "PATH": path, "OMP_NUM_THREADS": "1"}


def _write(folder: Path, block: str) -> None:
    head, _, text = block.partition("\n")
    target = folder / head.removeprefix("# ")
    assert target.exists(), f"{head} is not a file that `accelz new` writes"
    target.write_text(text)


PART = re.compile(r'accelz check acme -k "?([^"\n]+)"?\n')


def test_the_guide_leads_to_a_green_kit(vendor: Path) -> None:
    """The parts of the kit that follow the first file are one run at the end, which starts once.

    Its thorough tests, such as those of four ranks, are part of the whole kit on the same device and the same
    collectives, in tests/sim.
    """
    blocks = re.findall(r"^```(sh|python|text)\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 10
    parts = [part[1] for kind, block in blocks if kind == "sh" and (part := PART.fullmatch(block))]
    assert len(parts) == 4
    for kind, block in blocks:
        if kind == "python":
            _write(vendor, block)
        elif kind == "text":
            command, _, shown = block.removeprefix("$ ").partition("\n")
            done = _bash(vendor, command)
            for line in shown.splitlines():
                said = line.removeprefix("  got:  NotImplementedError at /home/you/").partition(" in 2.28 s")
                assert line.strip() == "..." or said[0] in done.stdout, done.stdout
        elif block != WHOLE_KIT and not PART.fullmatch(block):
            _succeeds(vendor, block)
    tests, paths = f"({') or ('.join(parts)})", _variables(vendor)["PYTHONPATH"]
    code, summary = forked.check(vendor, tests, name="acme", quick=True, PYTHONPATH=f"{paths}:{ROOT}")
    assert (code, summary["failures"]) == (0, [])
    assert summary["passed"] > 100


def _succeeds(folder: Path, script: str) -> None:
    done = _bash(folder, script)
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"


def test_the_whole_kit_is_the_one_command_left_out() -> None:
    assert f"```sh\n{WHOLE_KIT}```" in GUIDE


def test_what_it_names_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", GUIDE):
        assert (ROOT / "docs" / target).exists(), target
    headings = {
        re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", GUIDE, re.M)
    }
    assert set(re.findall(r"\(#([\w-]+)\)", GUIDE)) <= headings


def test_it_says_which_operations_are_to_be_written() -> None:
    """In a table by role: all that have no default; of roles whose operations are few, the others, too."""
    rows = re.findall(r"^\| (`[A-Z].*?) \| (.*?) ?\| (.*?) ?\|$", GUIDE, re.MULTILINE)
    for role, names in OPERATIONS.items():
        ((to_write, others),) = [row[1:] for row in rows if f"`{role}`" in row[0]]
        abstract = getattr(getattr(accelz, role), "__abstractmethods__", frozenset())
        written = {name for name in names.split() if f"`{name}`" in to_write}
        assert written == (set() if "all, " in others else abstract), role
        assert "all, " in others or written | set(re.findall(r"`(\w+)`", others)) == set(names.split()), role
