"""Faults that can be switched on, each in this process alone, to test how an engine handles them.

with faults.capacity(1 << 20): ...             # the current device holds 1 MiB
with faults.out_of_memory(3): ...              # the third allocation from here raises
with faults.collective("fails", 2): ...        # the second collective from here raises at wait()
with faults.collective("stalls", 1): ...       # the next one is never joined by this rank
with faults.collective("is aborted", 1): ...   # the next one does nothing, and wait() does not report it
with faults.prompt_streams(): ...              # side streams run at once: is a wait missing?
with faults.late_stream(stream): ...           # only this one runs late: does everything else wait for it?
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Stream

from accelz_sim import _C

Kind = Literal["fails", "stalls", "is aborted"]


@contextmanager
def capacity(nbytes: int) -> Iterator[None]:
    """Let the current device hold `nbytes` bytes; more raises torch.OutOfMemoryError."""
    device = _C.current_device()
    _, _, whole = _C.counters(device)
    _C.set_capacity(device, nbytes)
    try:
        yield
    finally:
        _C.set_capacity(device, whole)


@contextmanager
def out_of_memory(nth: int) -> Iterator[None]:
    """Make the `nth` allocation of device memory from here raise torch.OutOfMemoryError, once.

    nth: counted from 1, over all devices; empty tensors do not count.
    """
    _C.fail_allocation(_positive(nth))
    try:
        yield
    finally:
        _C.fail_allocation(0)


@contextmanager
def collective(kind: Kind, nth: int) -> Iterator[None]:
    """Make the `nth` collective from here fail, stall or be aborted on this rank, once.

    This rank does not join the collective, so the others run into their timeout. "fails": wait() raises
    CollectiveError here at once. "stalls": wait() raises it when the group's timeout has passed. "is
    aborted", to be switched on in all ranks: wait() returns, like that of a library that runs asynchronously
    to the host, and check() raises within the block.
    """
    global _armed, _aborted
    _armed = _Armed(kind, _positive(nth))
    try:
        yield
    finally:
        _armed, _aborted = None, False


@contextmanager
def prompt_streams() -> Iterator[None]:
    """Run work on side streams at once, as on the default stream. Work queued before runs first.

    A result that is wrong without this and right with it points to a missing wait, or memory freed too early.
    """
    _C.set_delays(False)
    try:
        yield
    finally:
        _C.set_delays(True)


@contextmanager
def late_stream(stream: Stream) -> Iterator[None]:
    """Run work at once on all streams except this one. Work queued before runs first.

    If all side streams are late, one that lacks a wait may still happen to run after what it needs.
    """
    _C.set_late(stream.stream_id)
    try:
        yield
    finally:
        _C.set_late(0)


class _Armed:
    def __init__(self, kind: Kind, left: int) -> None:
        self.kind = kind
        self.left = left


_armed: _Armed | None = None
_aborted = False


def next_collective() -> Kind | None:
    """Count one collective and return the fault that hits it, if any. For `accelz_sim.collectives` alone."""
    global _armed, _aborted
    if _armed is None:
        return None
    _armed.left -= 1
    if _armed.left > 0:
        return None
    kind, _armed = _armed.kind, None
    _aborted = kind == "is aborted"
    return kind


def collective_was_aborted() -> bool:
    """Whether a collective has been aborted in this block. For `accelz_sim.collectives` alone."""
    return _aborted


def _positive(nth: int) -> int:
    if nth < 1:
        raise ValueError(f"nth is {nth}; the next one is 1")
    return nth
