"""Memory of processes as the kernel counts it, read from outside so that they are not disturbed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

INTERVAL = 0.003  # seconds between two samples
_RESET_PEAK = "5"  # proc(5): clear_refs 5 sets VmHWM back to the current resident set


@dataclass(frozen=True)
class Base:
    """Memory of processes that have only done their imports, in bytes.

    resident: resident set, by process. pss: of all together.
    """

    resident: tuple[int, ...]
    pss: int


@dataclass(frozen=True)
class Peak:
    """Bytes above the base. rank: the largest resident set of any process. node: PSS of all together."""

    rank: int
    node: int


def available() -> bool:
    """Whether this system reports PSS."""
    return Path("/proc/self/smaps_rollup").exists()


def base(pids: Sequence[int]) -> Base:
    return Base(tuple(_field(p, "status", "VmRSS") for p in pids), _pss(pids))


class PeakMeter:
    """Watches `pids` during its block; `peak` is then the most that they held.

    The kernel itself keeps each process's peak of resident memory. The sum of their PSS (a page shared by n
    processes counts 1/n in each) is sampled.
    """

    def __init__(self, pids: Sequence[int], above: Base) -> None:
        self._pids = list(pids)
        self._base = above
        self._pss = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def peak(self) -> Peak:
        highs = [_field(pid, "status", "VmHWM") for pid in self._pids]
        above = [high - low for high, low in zip(highs, self._base.resident, strict=True)]
        return Peak(max(above), self._pss - self._base.pss)

    def _sample(self) -> None:
        while not self._done.wait(INTERVAL):
            self._pss = max(self._pss, _pss(self._pids))


def _pss(pids: Sequence[int]) -> int:
    return sum(_field(pid, "smaps_rollup", "Pss") for pid in pids)


def _field(pid: int, file: str, name: str) -> int:
    """The value of a "Name:  123 kB" line of a file in /proc/PID, in bytes."""
    try:
        text = Path(f"/proc/{pid}/{file}").read_text()
    except ProcessLookupError:  # it died, which the job will report
        return 0
    return next((int(x.split()[1]) * 1024 for x in text.splitlines() if x.startswith(f"{name}:")), 0)
