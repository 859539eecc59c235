"""The notebooks of examples/ run from their first cell to their last."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "examples" / "notebooks").glob("*.ipynb"))


def lines(notebook: nbformat.NotebookNode) -> list[str]:
    """What its cells print."""
    texts = (o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    return "".join(texts).splitlines()


def steady(printed: list[str]) -> list[str]:
    """What does not depend on the machine: plans and sizes."""
    return sorted(line for line in printed if " GB on each device" in line or " holds " in line)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_shows(path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    found = nbformat.from_dict(stored)
    os.environ["OMP_NUM_THREADS"] = "1"
    NotebookClient(found, timeout=120, kernel_name="python3").execute()
    shown, printed = lines(stored), lines(found)
    assert [o["text"] for c in found.cells for o in c.get("outputs", []) if o.get("name") == "stderr"] == []
    drawn = [o["data"].get("text/html", "") for c in found.cells for o in c.get("outputs", []) if "data" in o]
    assert ["Vega" in page for page in drawn] == [True], "the report"
    assert steady(printed) == steady(shown)
    assert len(steady(shown)) == 7  # five plans, two ranks
    table = [line.split() for line in (*shown, *printed) if line.split()[:2] == ["phase", "peak"]]
    assert len(table) == 2
    assert table[0] == table[1]
    means = [line.split("the first matrix has the mean ")[1][:7] for line in printed if "mean" in line]
    assert len(means) == 3
    assert len(set(means)) == 1  # of one rank, of two, and of their checkpoint on one
