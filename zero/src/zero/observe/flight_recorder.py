"""Writes what a rank has issued and where its threads are, when a collective fails, on SIGUSR1, and when
another rank asks for it.

A main thread that waits in a communication library runs no signal handler of Python's. So signals come
through a pipe to a thread of the recorder's own. Ranks ask each other by a file in the folder that they
share, as whatever else they communicate through may be what hangs.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from zero.errors import UsageError
from zero.observe.flight_file import KEPT, Flight, Issuing, path_of
from zero.warning import is_inside, warn

LOOK_EVERY = 1.0
"""Seconds between looks at whether another rank asks."""
_ASKED = "asked"
_ON_SIGNAL = "SIGUSR1"


class FlightRecorder:
    """Of a process. folder: which all ranks see, for their files. lines: one for the groups of some engines,
    which returns None once these are gone."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.folder = folder
        self.lines: list[Callable[[], Issuing | None]] = []
        self.rank, self.world_size = rank, world_size
        folder.mkdir(parents=True, exist_ok=True)
        path_of(folder, rank).unlink(missing_ok=True)
        self._ask = folder / _ASKED
        self._seen = self._asked()
        self._failed = False
        self._lock = threading.Lock()
        self._signals, into = os.pipe()
        os.set_blocking(into, False)
        self._next = _listen(into)
        threading.Thread(target=self._serve, name="zero flight recorder", daemon=True).start()

    def failed(self, why: str) -> None:
        """A collective has failed: write, and ask the others to. What comes later writes nothing more."""
        if self._failed:
            return
        self._failed = True
        try:
            self._write(why)
            self._ask_others()
        except OSError as error:  # the collective's own error is worth more
            warn(f"the flight recorder could not write to {self.folder}: {error}", RuntimeWarning)

    def rearm(self) -> None:
        """A new engine begins: its failures are written, too."""
        if self._failed:
            self._seen, self._failed = self._asked(), False

    def _serve(self) -> None:
        poll = select.poll()  # select() takes no descriptor from 1024 on
        poll.register(self._signals, select.POLLIN)
        while True:
            signals = os.read(self._signals, 4096) if poll.poll(1000 * LOOK_EVERY) else b""
            if signals and self._next >= 0:
                with suppress(OSError):
                    os.write(self._next, signals)
            with suppress(Exception):  # there will be another look
                self._look(signal.SIGUSR1 in signals)

    def _look(self, signalled: bool) -> None:
        asked = self._asked()
        if self._failed or not (signalled or asked > self._seen):
            return
        self._write(_ON_SIGNAL if signalled else "another rank has written its own")
        if signalled:
            self._ask_others()
        self._seen = self._asked()

    def _write(self, reason: str) -> None:
        with self._lock:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            frames = {names.get(i, str(i)): f for i, f in sys._current_frames().items()}
            main = frames.get(threading.main_thread().name)
            Flight(
                rank=self.rank,
                world_size=self.world_size,
                host=socket.gethostname(),
                pid=os.getpid(),
                time=time.time(),
                reason=reason,
                lines=tuple(self._seen_lines()),
                stacks={name: _stack(frame) for name, frame in frames.items()},
                place="" if main is None else described(program_line(main)),
            ).write(self.folder)

    def _seen_lines(self) -> Iterator[Issuing]:
        for line in tuple(self.lines):
            found = line()
            if found is None:
                self.lines.remove(line)
            else:
                yield replace(found, collectives=found.collectives[-KEPT:])

    def _ask_others(self) -> None:
        self._ask.write_text(f"{self.rank}\n", encoding="utf-8")

    def _asked(self) -> int:
        """When a rank last asked, as the file system counts; 0 for never."""
        try:
            return self._ask.stat().st_mtime_ns
        except OSError:
            return 0


_of_process: list[FlightRecorder] = []


def known_recorder() -> FlightRecorder | None:
    """The process's recorder, if it has one."""
    return next(iter(_of_process), None)


def recorder_of(folder: Path, rank: int, world_size: int) -> FlightRecorder:
    """The process's recorder, made at the first call. Raises UsageError for another folder than before."""
    if not _of_process:
        _of_process.append(FlightRecorder(folder, rank, world_size))
    if _of_process[0].folder != folder:
        raise UsageError(
            f"this process has a flight recorder already, which writes to {_of_process[0].folder}: "
            "one folder is enough for all its engines"
        )
    return _of_process[0]


Line = tuple[str, int, str]  # file, line, function


def program_line(frame: FrameType) -> Line:
    """The innermost line, from this frame on, that is not inside the packages."""
    while _is_inside(frame.f_code) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


@cache
def _is_inside(code: CodeType) -> bool:
    return is_inside(code.co_filename)


def described(line: Line) -> str:
    return "{}:{} in {}".format(*line)


def _stack(frame: FrameType) -> list[str]:
    return [described((f.filename, f.lineno or 0, f.name)) for f in traceback.extract_stack(frame)]


def _listen(into: int) -> int:
    """Have SIGUSR1 written to a pipe, beside what it did before. Returns where other signals are to be sent
    on, or -1. faulthandler goes on writing to standard error: where else is not known.

    Only a main thread can. Elsewhere ranks still write when a collective fails, or when another asks; the
    pipe stays open, as its end would be read without a pause.
    """
    if threading.current_thread() is not threading.main_thread():
        return -1
    before: Any = signal.getsignal(signal.SIGUSR1)
    unregister: Any = faulthandler.unregister  # whose result typeshed does not know
    dumps = unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before if callable(before) else _ignore)
    if dumps:
        faulthandler.register(signal.SIGUSR1, chain=True)
    return signal.set_wakeup_fd(into, warn_on_full_buffer=False)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The default would end the process."""
