"""What importing zero and asking for help load: modules are counted, since a clock depends on the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.host

HEAVY = ("torch", "numpy", "pydantic", "typer", "rich", "safetensors")


def loaded(statement: str) -> tuple[set[str], int]:
    """Which heavy packages, and how many modules in all, a fresh interpreter has after a statement."""
    program = f"""
import sys
before = len(sys.modules)
try:
    {statement}
except SystemExit:
    pass
print(",".join(name for name in {HEAVY} if name in sys.modules), len(sys.modules) - before, sep=";")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names, _, count = done.stdout.splitlines()[-1].partition(";")
    return set(filter(None, names.split(","))), int(count)


def test_importing_zero_loads_none_of_what_it_needs_later() -> None:
    heavy, modules = loaded("import zero")
    assert heavy == set()
    assert modules < 40


def test_help_loads_typer_alone() -> None:
    heavy, modules = loaded("from zero.cli import app; app(['--help'], prog_name='zero')")
    assert heavy == {"typer", "rich"}
    assert modules < 420
