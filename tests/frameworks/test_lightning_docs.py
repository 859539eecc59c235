"""The programs of docs/frameworks-lightning.md run, on two ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from accelz.conformance.cluster import Clusters, Context

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "frameworks-lightning.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def program_body(context: Context, program: str, folder: str) -> None:
    os.chdir(folder)
    exec(compile(program, PAGE.name, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("program", PROGRAMS, ids=["trainer", "fabric"])
def test_a_program_runs(cluster: Clusters, tmp_path: Path, program: str) -> None:
    cluster(2).run(program_body, program=program, folder=str(tmp_path))
