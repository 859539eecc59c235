"""What one engine has issued on this rank: counted, and hashed for comparison with the other ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from zlib import crc32

import torch

from zero.communication.job import JobGroups
from zero.communication.line import Kind, Line
from zero.communication.reports import Issued


@dataclass
class Traffic:
    """Counts of collectives issued, and their bytes, by kind; units: the bytes by unit.

    Bytes are those of the gathered, scattered or reduced whole buffer, or of all that ranks send in an
    all-to-all.
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    units: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        self.calls.clear()
        self.units.clear()
        self.bytes.clear()


class Ledger:
    """One engine's entries in the line of all engines; made when it is the newest.

    name: the model's class, for messages. count: of entries.
    """

    def __init__(self, groups: JobGroups, name: str) -> None:
        self.traffic = Traffic()
        self.count = 0
        self._groups = groups
        self._engine = groups.line.engine
        self._label = f" of engine {self._engine} ({name})"
        # Running hashes: of reductions and of everything else separately, since a graph that is partly on the
        # host may run either sooner.
        self._hashes: dict[Kind, int] = {"reductions": 0, "others": 0}

    @property
    def line(self) -> Line:
        return self._groups.line

    @property
    def hashes(self) -> list[int]:
        """Numbers that are the same on all ranks if they have issued the same collectives."""
        return [*self._hashes.values(), *self.line.turns]

    def collective(
        self,
        op: str,
        unit: str,
        numel: int,
        dtype: torch.dtype,
        ranks: int | None,
        origin: str,
        even: bool = True,
    ) -> Issued:
        """Enter a collective.

        numel: of the whole buffer. ranks: how many it is among; None for the whole job. even: whether numel
        is equal on all ranks, those among which other collectives take its place included.
        """
        text, encoded = _described(op, unit, numel if even else None, dtype, ranks, origin)
        kind: Kind = "reductions" if op in _REDUCTIONS else "others"
        self._hashes[kind] = crc32(encoded, self._hashes[kind])
        nbytes = numel * dtype.itemsize
        self.traffic.calls[op] += 1
        self.traffic.bytes[op] += nbytes
        self.traffic.units[unit] += nbytes
        return self._enter(kind, text, op, unit, nbytes)

    def exchange(self, what: str) -> Issued:
        """Enter an exchange, which is not hashed."""
        return self._enter("exchanges", f"{what} exchange", "exchange", "", 0)

    def _enter(self, kind: Kind, text: str, op: str, unit: str, nbytes: int) -> Issued:
        self.count += 1
        line = self._groups.line
        text = text + self._label if line.engine > 1 else text
        return line.enter(self._engine, kind, text, op, unit, nbytes)


_REDUCTIONS = ("reduce_scatter", "all_reduce")


@lru_cache(maxsize=4096)  # a step issues the same as the one before
def _described(
    op: str, unit: str, numel: int | None, dtype: torch.dtype, ranks: int | None, origin: str
) -> tuple[str, bytes]:
    """Return an entry's text, and the bytes to hash."""
    among = "" if ranks is None else f" among {ranks} ranks"
    size = "" if numel is None else f"{numel} x "
    text = f"{op} of unit {unit!r} ({size}{str(dtype).removeprefix('torch.')}){among}{origin}"
    return text, text.encode()
