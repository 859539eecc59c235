"""How fast collectives, and copies between memories, are: timed in a step once in a while."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from accelz import Accelerator, Event

_NOTICED = 20e-6
"""Seconds: what takes longer than this between two marks was waited for."""


@dataclass
class Transfer:
    """kind: of a collective, or "to host" or "to device". marks: where the device's queue was before it was
    issued and after, and before it was waited for and after."""

    kind: str
    nbytes: int
    marks: list[Event] = field(default_factory=list)


class Transfers:
    """accelerator: whose streams it is issued on. on: whether what is issued now is timed. noted: what was
    issued since the step began."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.on = False
        self.noted: list[Transfer] = []
        self._accelerator = accelerator

    def begin(self, kind: str, nbytes: int) -> Transfer | None:
        """Something is about to be issued on the current stream."""
        if not self.on:
            return None
        transfer = Transfer(kind, nbytes)
        self.noted.append(transfer)
        self.mark(transfer)
        return transfer

    def mark(self, transfer: Transfer | None) -> None:
        """It has been issued, is about to be waited for, or has been."""
        if transfer is not None and len(transfer.marks) < 4:
            transfer.marks.append(self._accelerator.streams.current().record())


def rates(transfers: Iterable[Transfer]) -> dict[str, float]:
    """Bytes per second by kind, of what was waited for: when others were over is not known.

    One begins when it is issued, or when the one of its kind before it is over.
    """
    nbytes, seconds = Counter[str](), dict[str, float]()
    last: dict[str, Event] = {}
    for each in transfers:
        end = _end(each)
        if end is None:
            continue
        took = end.seconds_since(each.marks[0])
        if each.kind in last:
            took = min(took, end.seconds_since(last[each.kind]))
        last[each.kind] = end
        if took > 0:
            nbytes[each.kind] += each.nbytes
            seconds[each.kind] = seconds.get(each.kind, 0.0) + took
    return {kind: n / seconds[kind] for kind, n in nbytes.items()}


def _end(transfer: Transfer) -> Event | None:
    """The mark at which it was over; None if that was between marks."""
    for before, after in ((2, 3), (0, 1)):
        if len(transfer.marks) > after:
            end = transfer.marks[after]
            if end.seconds_since(transfer.marks[before]) > _NOTICED:
                return end
    return None
