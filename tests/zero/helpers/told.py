"""What a rank is told: errors as text, and what it logs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import zero


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except zero.ZeroError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


class Heard(logging.Handler):
    """What this rank logs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("zero").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
