"""The outcome of a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Outcome:
    """How a step ended.

    ok: nothing failed. part: which tests were asked for, "" for all. misses: targets that were not met.
    detail: the step's own result.
    """

    name: str
    ok: bool
    summary: str
    seconds: float = 0.0
    part: str = ""
    misses: list[str] = field(default_factory=list)
    detail: Any = None

    def plain(self) -> dict[str, Any]:
        return asdict(self)
