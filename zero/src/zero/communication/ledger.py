"""What a rank has issued: counted, logged by unit, and hashed for comparison with the other ranks."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from zlib import crc32

import torch

LOG_LENGTH = 256


@dataclass
class Traffic:
    """Counts of collectives issued, and their bytes.

    Bytes are those of the gathered, scattered or reduced whole buffer, or of all that ranks send in an
    all-to-all.
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()


@dataclass(frozen=True)
class Entry:
    """A collective or exchange that a rank issues. number: from 1. began: on the monotonic clock."""

    number: int
    text: str
    began: float = field(default_factory=time.monotonic)


class Ledger:
    """Collectives, and exchanges in host memory, of one engine on one rank.

    log: the number and text of the last LOG_LENGTH. hashes: running hashes of the collectives, of reductions
    and of everything else separately, since a graph that is partly on the host may run either sooner.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.log: deque[tuple[int, str]] = deque(maxlen=LOG_LENGTH)
        self.hashes = {"reductions": 0, "others": 0}
        self.count = 0

    def collective(self, op: str, unit: str, numel: int, dtype: torch.dtype, origin: str) -> Entry:
        """Enter a collective. numel: of the whole buffer, equal on all ranks."""
        text = f"{op} of unit {unit!r} ({numel} x {str(dtype).removeprefix('torch.')}){origin}"
        kind = "reductions" if op in ("reduce_scatter", "all_reduce") else "others"
        self.hashes[kind] = crc32(text.encode(), self.hashes[kind])
        self.traffic.calls[op] += 1
        self.traffic.bytes[op] += numel * dtype.itemsize
        return self._entered(text)

    def exchange(self, what: str) -> Entry:
        """Enter an exchange, which is outside of the hashed sequence."""
        return self._entered(f"{what} exchange")

    def _entered(self, text: str) -> Entry:
        self.count += 1
        self.log.append((self.count, text))
        return Entry(self.count, text)
