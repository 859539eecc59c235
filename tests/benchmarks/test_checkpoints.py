"""The benchmarks of checkpoints, made tiny: they run, and what they compare is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.command import bench, forked_bench

pytestmark = pytest.mark.slow  # starts programs


def rows_of(out: Path, key: str) -> dict[str, dict[str, Any]]:
    (result,) = json.loads(out.read_text())["results"]
    return {row[key]: row for row in result["rows"]}


def test_saving(tmp_path: Path) -> None:
    (folder := tmp_path / "saved").mkdir()
    out = tmp_path / "saving.json"
    flags = "saving --size tiny --rounds 1 --steps 4 --every 2"
    done = forked_bench(tmp_path, *flags.split(), "--folder", str(folder), "--json", str(out))
    assert done.returncode == 0, done.stderr
    rows = rows_of(out, "case")
    assert list(rows) == [
        "raw write", "save_checkpoint", "training", "training, saving in the background",
    ]  # fmt: skip
    assert rows["save_checkpoint"]["bytes"] > 12 * 100_000, "masters and moments"
    assert rows["save_checkpoint"]["of_raw"] > 0
    assert list(folder.iterdir()) == [], "nothing is left on the disk"


def test_consolidate(tmp_path: Path) -> None:
    out = tmp_path / "consolidate.json"
    flags = "consolidate --parameters 2000000 --ranks 3 --rounds 1"
    done = bench(*flags.split(), "--folder", str(tmp_path), "--json", str(out))
    assert done.returncode == 0, done.stderr
    rows = rows_of(out, "by")
    assert rows["zero fp32"]["equal"]
    assert rows["zero fp32"]["bytes"] > 2 * 0.95 * rows["zero bf16"]["bytes"]
    assert rows["copy"]["peak_bytes"] < rows["zero fp32"]["peak_bytes"] < 1 << 30
    assert list(tmp_path.iterdir()) == [out]
