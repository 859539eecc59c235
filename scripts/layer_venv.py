"""Add the packages of another virtual environment to the one that runs this: `python layer_venv.py .venv`.

pip then finds them installed, and installs only what is missing. The path is relative, so both environments
may be moved together.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path


def main() -> int:
    own = Path(sysconfig.get_path("purelib"))
    below = Path(sys.argv[1]).resolve() / own.relative_to(sys.prefix)
    away = os.path.relpath(below, sys.prefix)
    # addsitedir, not the bare path: it heeds the .pth files there, of editable packages
    line = f"import os, site, sys; site.addsitedir(os.path.normpath(os.path.join(sys.prefix, {away!r})))\n"
    (own / "layered.pth").write_text(line, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
