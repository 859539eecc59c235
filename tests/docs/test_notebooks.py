"""The notebooks of examples/ run from their first cell to their last."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_shows(path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    found = nbformat.from_dict(stored)
    os.environ["OMP_NUM_THREADS"] = "1"
    NotebookClient(found, timeout=120, kernel_name="python3").execute()
    printed = "".join(o.get("text", "") for cell in found.cells for o in cell.get("outputs", []))
    means = [
        line.split("the first matrix has the mean ")[1][:7] for line in printed.splitlines() if "mean" in line
    ]
    assert len(means) == 3
    assert len(set(means)) == 1  # of one rank, of two, and of their checkpoint on one
    assert "rank 1 holds" in printed
