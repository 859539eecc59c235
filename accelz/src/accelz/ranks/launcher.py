"""The process that has started this rank, and ends it or starts it again, if it is torchrun's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped]

_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
_OF_A_RANK = ("RANK", _BY_TORCHRUN)


@dataclass(frozen=True)
class Launcher:
    """torchrun's process on this machine, as far as this one can see it."""

    process: psutil.Process

    @classmethod
    def find(cls) -> Launcher | None:
        """The nearest process above this one that is no rank's, if torchrun has started this one.

        A rank's program may be started through others, such as a shell, which have the rank's environment.
        """
        if _BY_TORCHRUN not in os.environ:
            return None
        above: Any = _parent(psutil.Process())
        while above is not None and _is_of_a_rank(above):
            above = _parent(above)
        return None if above is None else cls(above)

    def has_ended(self) -> bool:
        """Whether it has ended, whether or not its own parent has noticed."""
        try:
            return not self.process.is_running() or self.process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False

    def __str__(self) -> str:
        return f"torchrun's process on this machine ({self.process.pid})"


def _parent(process: psutil.Process) -> psutil.Process | None:
    try:
        return process.parent()
    except psutil.Error:
        return None


def _is_of_a_rank(process: psutil.Process) -> bool:
    try:
        return all(name in process.environ() for name in _OF_A_RANK)
    except psutil.Error:
        return False
