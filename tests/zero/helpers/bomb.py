"""What must not be unpickled."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Bomb:
    """Its unpickling makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)
