"""Every section of docs/frameworks.md with Python snippets runs, on two ranks, and the recipe for LoRA.

CPUs are asked for, as the page says of machines without an accelerator.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from accelerate.state import PartialState

from accelz.conformance.cluster import Clusters, Context
from tests.frameworks.jobs import begin_job

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "frameworks.md"
TEXTS = [*re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:], (DOCS / "recipes/lora.md").read_text()]
SECTIONS = {
    text.partition("\n")[0]: re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    for text in TEXTS
}


def run_snippets(context: Context, snippets: list[str], directory: str) -> None:
    begin_job(context)
    PartialState(cpu=True)
    program = "\n".join(snippets).replace('output_dir="run"', 'output_dir="run", use_cpu=True')
    before = os.getcwd()
    os.chdir(directory)
    try:
        exec(compile(program, str(PAGE), "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)


@pytest.mark.parametrize("section", [name for name, snippets in SECTIONS.items() if snippets])
def test_snippets_run_in_order(cluster: Clusters, tmp_path: Path, section: str) -> None:
    cluster(2).run(run_snippets, snippets=SECTIONS[section], directory=str(tmp_path))
