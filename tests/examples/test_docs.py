"""Every Python snippet of the READMEs and the user guide runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.accelz import forked

pytestmark = pytest.mark.slow  # trains

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("document", "ranks"),
    [
        ("README.md", 1),
        ("docs/user-guide.md", 2),
        ("docs/migration.md", 1),
        ("zero/README.md", 1),
        ("accelz/README.md", 1),
    ],
)
def test_snippets_run_in_order(document: str, ranks: int, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks, f"{document} has no snippets"
    script = tmp_path / "snippets.py"
    script.write_text("\n".join(blocks))
    done = forked.job(tmp_path, script, [], ranks, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
