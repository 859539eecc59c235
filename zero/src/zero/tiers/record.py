"""What an optimizer keeps of one sub-group: master and moments, in their tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero.settings.offload import Tier
from zero.tiers.placement import Placement
from zero.tiers.split import LOWER, SplitMaster
from zero.tiers.swap_file import PAGE, Section
from zero.tiers.values import Values


@dataclass(frozen=True)
class Opened:
    """A record in memory, to be stepped. All (numel,), on one device."""

    master: Tensor
    moments: tuple[Tensor, ...]


@dataclass
class Record:
    """master: the originals of parameters, fp32 (fp64 where they are). moments: one value each.

    tier: where they are, but for a master that is the shard and stays with it. On disk a record is one
    contiguous stretch, master first, of whole pages a section.
    """

    tier: Tier
    master: Values
    moments: tuple[Values, ...] = ()

    def opened(self) -> Opened:
        """Master and moments of a record that is in memory."""
        assert isinstance(self.master, Tensor)
        moments = [m for m in self.moments if isinstance(m, Tensor)]
        return Opened(self.master, tuple(moments))

    def bytes_on(self, device: torch.device, shard: Values) -> int:
        """Bytes in use on `device`, those of a master that is the shard itself not among them."""
        values = [v for v in (self.master, *self.moments) if v is not shard]
        return sum(v.numel() * v.element_size() for v in values if _is_on(v, device))

    @property
    def sections(self) -> list[Section]:
        """The sections of a record on disk, as they lie there one after another."""
        first = self.master.lower if isinstance(self.master, SplitMaster) else self.master
        return [v for v in (first, *self.moments) if isinstance(v, Section)]

    def unpack(self, sections: Sequence[Tensor], scratch: Tensor | None) -> Opened:
        """What has been read of a record on disk, to be stepped. scratch: (numel,) fp32, for a split
        master."""
        if not isinstance(self.master, SplitMaster):
            return Opened(sections[0], tuple(sections[1:]))
        assert scratch is not None
        self.master.join(sections[0], scratch)
        return Opened(scratch, tuple(sections[1:]))

    def pack(self, state: Opened, sections: Sequence[Tensor]) -> None:
        """The reverse, before it is written; moments have been stepped where they are."""
        if isinstance(self.master, SplitMaster):
            self.master.split(state.master, sections[0])


def _is_on(values: Values, device: torch.device) -> bool:
    return isinstance(values, Tensor) and values.device == device


@dataclass(frozen=True)
class DiskFormat:
    """What is kept on disk. moments: of a record, for each element. compact: of masters, what bf16 weights
    lack."""

    moments: int = 0
    compact: bool = False

    def record(self, dtype: torch.dtype, splits: bool) -> list[torch.dtype]:
        """The dtypes of a record, section by section. splits: the weights may be the master's upper half."""
        return [LOWER if self.compact and splits else dtype, *([dtype] * self.moments)]

    def nbytes(self, numel: int, dtype: torch.dtype, placement: Placement, gradient: torch.dtype) -> int:
        """Bytes that a group of `numel` elements in `dtype` takes. gradient: dtype of its reduced slice."""
        wide = torch.promote_types(dtype, torch.float32)
        of_record = self.record(wide, dtype is torch.bfloat16)
        sections = [(n, d) for n, tier in placement.optimizer if tier == "disk" for d in of_record]
        if placement.params == "disk":
            sections.append((numel, dtype))
        if placement.gradients == "disk":
            sections.append((numel, gradient))
        return sum(section_bytes(*section) for section in sections)


def section_bytes(numel: int, dtype: torch.dtype) -> int:
    """A section's bytes on disk, in whole pages."""
    return -(-numel * dtype.itemsize // PAGE) * PAGE
