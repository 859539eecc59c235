"""Every Python snippet of the documentation runs.

Pages of the guide go on from the start page, as they say: its snippets run before those of each. A job runs
many pages, each with names of its own, and an error names the line of the page.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.accelz import forked

ROOT = Path(__file__).resolve().parents[2]
START = "docs/index.md"
OF_ONE_RANK = [
    "README.md",
    "zero/README.md",
    "accelz/README.md",
    "docs/migration.md",
    "docs/migration-deepspeed.md",
]
ELSEWHERE = {
    "docs/frameworks.md": "tests/frameworks/test_docs.py",
    "docs/frameworks-lightning.md": "tests/frameworks/test_lightning_docs.py",
    "docs/frameworks-others.md": "by hand: most of these frameworks cannot be installed beside each other",
    "docs/long-sequences.md": "tests/zero/parallel has the same calls, with a model",
    "docs/meshes.md": "tests/zero/communication/test_mesh_jobs.py has the same calls, with a model",
    "docs/parameters.md": "tests/frameworks/test_quantised_parameters.py has the same calls, with a model",
    "docs/parallel-plans.md": "tests/frameworks/test_parallel.py and tests/zero/parallel have the same calls",
    "docs/pipelines.md": "tests/zero/training_pass/test_pipelines.py has the same calls, with a model",
    "docs/recipes/lora.md": "tests/frameworks/test_docs.py",
    "docs/vendor-guide.md": "tests/accelz/test_vendor_guide.py",
}
DECIDED = "docs/decisions/"  # what was decided then, in the code of then
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
PROGRAM = """
import gc, json, sys

pages, start = json.loads(sys.argv[1]), sys.argv[2] or None
for name, source in pages.items():
    print(name, flush=True)
    names = {"__name__": "__main__"}
    if start and name != start:
        exec(compile(pages[start], start, "exec"), names)
    exec(compile(source, name, "exec"), names)
    names.clear()
    gc.collect()
"""


def snippets(page: str) -> str:
    """A page's snippets as one program, in which each is on its lines of the page."""
    text = (ROOT / page).read_text()
    lines = [""] * text.count("\n")
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        code = block[1].splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines)


def pages() -> list[str]:
    """The documents that have snippets."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/**/*.md")]
    names = [path.relative_to(ROOT).as_posix() for path in found]
    return sorted(name for name in names if snippets(name).strip() and not name.startswith(DECIDED))


LONGER = {"vendor-guide.md": 3000}  # in words; others have at most WORDS
WORDS = 1200
OF_TWO_RANKS = [START, *(name for name in pages() if name not in {START, *OF_ONE_RANK, *ELSEWHERE})]


@pytest.mark.slow  # trains
@pytest.mark.parametrize(
    ("ranks", "start", "documents"), [(1, "", OF_ONE_RANK), (2, START, OF_TWO_RANKS)], ids=["alone", "guide"]
)
def test_snippets_run_in_order(ranks: int, start: str, documents: list[str], tmp_path: Path) -> None:
    script = tmp_path / "snippets.py"
    script.write_text(PROGRAM)
    programs = json.dumps({name: snippets(name) for name in documents})
    done = forked.job(tmp_path, script, [programs, start], ranks, TMPDIR=str(tmp_path))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_no_page_is_forgotten() -> None:
    assert set(pages()) == {*OF_ONE_RANK, *OF_TWO_RANKS, *ELSEWHERE}


def test_pages_are_short() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        words = len(_CODE.sub("", page.read_text()).split())
        assert words <= LONGER.get(name, WORDS), f"{name} has {words} words"


def test_every_variable_of_the_environment_is_explained() -> None:
    page = (ROOT / "docs/environment.md").read_text()
    sources = [path.read_text() for path in ROOT.glob("*/src/**/*.py")]
    named = {name for text in sources for name in re.findall(r'"((?:ACCELZ|ZERO)_[A-Z_]+)"', text)}
    assert len(named) >= 6
    assert named == set(re.findall(r"`((?:ACCELZ|ZERO)_[A-Z_]+)`", page))
