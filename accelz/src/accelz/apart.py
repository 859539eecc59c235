"""Calls of other people's code that may hang or crash, made in a forked child of this process.

One child makes all calls in turn. Where it hangs or dies, the call at hand is lost, and another child goes on
with the next; so the usual case costs one fork, which takes milliseconds.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

Say = Callable[[str], None]
"""How a call says what it does next."""
Call = Callable[[Say], Any]
"""A call: its result is JSON, and it raises nothing."""
Slow = Callable[[Call, str], None]
"""Told once of each call that keeps this process waiting, and of what it has said that it does."""

PATIENT_SHARE = 0.3  # of the limit, after which it is told
LOOK_SECONDS = 0.01


@dataclass(frozen=True)
class Lost:
    """A call without an answer. at: what it said last. how: what became of its process. late: it took too
    long."""

    at: str
    how: str
    late: bool


def answers(calls: Sequence[Call], limit: float, slow: Slow) -> list[Any]:
    """The answer of each call, or a `Lost`. limit: seconds that may pass between what it says."""
    found: list[Any] = []
    while left := calls[len(found) :]:
        found += _of_child(left, limit, slow) or [call(lambda _: None) for call in left]
    return found


def _of_child(calls: Sequence[Call], limit: float, slow: Slow) -> list[Any]:
    """The answers that one child gives, of which the last may be a `Lost`; none where it cannot be made."""
    reader, writer = os.pipe()
    try:
        child = _fork()
        if child == 0:
            _answer(calls, writer)
    except (AttributeError, OSError):  # no such call, or no room for another process
        os.close(reader)
        return []
    finally:
        os.close(writer)
    try:
        return list(_collected(reader, child, calls, limit, slow))
    finally:
        os.close(reader)
        _end(child)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child starts no threads and takes no locks
        return os.fork()


def _answer(calls: Sequence[Call], writer: int) -> NoReturn:
    """The child: nothing that it prints is seen, and nothing of its parent's is ended by its end."""
    try:
        gc.disable()  # what the parent has dropped is not the child's to free
        faulthandler.disable()  # a crash is an answer here
        os.setsid()  # so that what it starts can be ended with it
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        for call in calls:
            _tell(writer, answer=call(lambda at: _tell(writer, at=at)))
    finally:
        os._exit(0)


def _tell(writer: int, **fact: Any) -> None:
    with os.fdopen(os.dup(writer), "w") as pipe:
        pipe.write(json.dumps(fact) + "\n")


def _collected(reader: int, child: int, calls: Sequence[Call], limit: float, slow: Slow) -> Iterator[Any]:
    left, told, at, rest = list(calls), False, "", b""
    while left:
        deadline = time.monotonic() + limit
        while b"\n" not in rest:
            if not told and not _readable(reader, deadline - (1 - PATIENT_SHARE) * limit):
                told = True
                slow(left[0], at)
            part = _read(reader, deadline)
            if not part:
                how = None if part is None else _how_it_ended(child, deadline)
                yield Lost(at, how or f"did not return within {limit:g} s", late=how is None)
                return
            rest += part
        line, _, rest = rest.partition(b"\n")
        fact = json.loads(line)
        if "at" in fact:
            at = fact["at"]
        else:
            left.pop(0)
            told = False
            yield fact["answer"]


def _read(reader: int, deadline: float) -> bytes | None:
    """What the child has written; nothing at its end, and None at the deadline."""
    return os.read(reader, 1 << 16) if _readable(reader, deadline) else None


def _readable(reader: int, deadline: float) -> bool:
    ready = select.poll()
    ready.register(reader, select.POLLIN)
    return bool(ready.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _how_it_ended(child: int, deadline: float) -> str | None:
    """What has become of the child, whose end of the pipe is closed; None if it lives on at the deadline."""
    try:
        end = _waited_for(child, deadline)
    except ChildProcessError:  # SIGCHLD is ignored in this process, so nobody knows
        return "ended the process"
    if end is None:
        return None
    if end.si_code == os.CLD_EXITED:
        return f"ended the process with code {end.si_status}"
    return f"crashed with {signal.Signals(end.si_status).name}"


def _waited_for(child: int, deadline: float) -> os.waitid_result | None:
    while True:
        end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG)  # its number stays the child's
        if end is not None or time.monotonic() > deadline:
            return end
        time.sleep(LOOK_SECONDS)


def _end(child: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)  # where it has not come to have a group
    with suppress(ChildProcessError):
        os.waitpid(child, 0)
