"""An optimizer's state of one sub-group: master and moments, in their tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zero.tiers.split_master import SplitMaster
from zero.tiers.swap_file import Section
from zero.tiers.values import Values

if TYPE_CHECKING:
    from zero.tiers.tier import Tier


@dataclass(frozen=True)
class Opened:
    """A record in memory, to be stepped. All (numel,), but for the scales of codes, on one device."""

    master: Tensor
    moments: tuple[Tensor, ...]


@dataclass
class Record:
    """Master and moments of one sub-group.

    master: the original values of the parameters, fp32 (fp64 for fp64 parameters). moments: one value per
    element each, in the master's dtype or in bf16; or codes in 8 bits, and then scales of their blocks. tier:
    where they are, except a master that is the shard, which stays with it. On disk a record is one contiguous
    stretch, master first, each section in whole pages.
    """

    tier: Tier
    master: Values
    moments: tuple[Values, ...] = ()

    def opened(self) -> Opened:
        """Return master and moments of a record that is in memory."""
        assert isinstance(self.master, Tensor)
        moments = [m for m in self.moments if isinstance(m, Tensor)]
        return Opened(self.master, tuple(moments))

    def bytes_on(self, device: torch.device, shard: Values) -> int:
        """Return the bytes in use on `device`, without those of a master that is the shard itself."""
        values = [v for v in (self.master, *self.moments) if v is not shard]
        return sum(v.numel() * v.element_size() for v in values if _is_on(v, device))

    @property
    def sections(self) -> list[Section]:
        """The sections of a record on disk, in the order in which they lie there."""
        first = self.master.lower if isinstance(self.master, SplitMaster) else self.master
        return [v for v in (first, *self.moments) if isinstance(v, Section)]

    def unpack(self, sections: Sequence[Tensor], scratch: Tensor | None) -> Opened:
        """Return a record read from disk, to be stepped. scratch: (numel,) fp32, for a split master."""
        if not isinstance(self.master, SplitMaster):
            return Opened(sections[0], tuple(sections[1:]))
        assert scratch is not None
        self.master.join(sections[0], scratch)
        return Opened(scratch, tuple(sections[1:]))

    def pack(self, state: Opened, sections: Sequence[Tensor]) -> None:
        """Reverse `unpack`, before the record is written; moments were stepped in place."""
        if isinstance(self.master, SplitMaster):
            self.master.split(state.master, sections[0])


def _is_on(values: Values, device: torch.device) -> bool:
    return isinstance(values, Tensor) and values.device == device
