"""Every Python snippet of the READMEs and the user guide runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
