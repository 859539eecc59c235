"""Device memory over a step: what it was used for, at every point where units come, go or are stepped."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from zero.config.paths import as_path
from zero.report import timeline
from zero.tiers.device_bytes import DeviceBytes, PhaseName


@dataclass(frozen=True)
class Use(DeviceBytes):
    """Bytes of the device by what they are for. activations: what forwards
    have left until their backward is over, and gradients on their way through it. other: what is none of
    these, such as inputs, buffers and what was there before. temporary: taken and given back between two
    points.
    """

    activations: int = 0
    other: int = 0
    temporary: int = 0


@dataclass(frozen=True)
class Sample:
    """A point in a step. unit: the one that comes, goes or has been stepped ("" for none). seconds: since the
    step began. held, activations, allocated: bytes at the point. peak: the most bytes since the point before.
    away: bit i is set if group i has, or in "step" had, a reduced gradient that has left the device.
    """

    phase: PhaseName
    unit: str
    seconds: float
    held: DeviceBytes
    activations: int
    allocated: int
    peak: int
    away: int

    @property
    def other(self) -> int:
        """Bytes that are neither the engine's nor a forward's."""
        return self.allocated - self.held.total - self.activations

    def use(self, most: int) -> Use:
        """The use at this point, near which `most` bytes were in use at one time."""
        rest = {"activations": self.activations, "other": self.other, "temporary": most - self.allocated}
        return Use(**asdict(self.held), **rest)


@dataclass(frozen=True)
class Peak:
    """The highest point of a phase. unit: that of the next sample. use: adds up to the peak's bytes."""

    phase: PhaseName
    unit: str
    use: Use


@dataclass(frozen=True)
class MemoryReport:
    """One optimizer step. capacity: bytes that the process may use of the device. exact: the device counts
    this process's bytes and no others; otherwise `other` has what else is in the host's memory. snapshot:
    torch's record of the step's allocations, where it keeps one."""

    samples: tuple[Sample, ...]
    capacity: int
    exact: bool = True
    snapshot: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    @property
    def peak(self) -> int:
        """Most bytes of the device in use at one time."""
        return max(sample.peak for sample in self.samples)

    def uses(self) -> list[Use]:
        """For each sample, what the peak since the one before was for: what was in use at the one of the two
        that had more, and on top of that what was temporary."""
        return [
            (before if sample.allocated < before.allocated <= sample.peak else sample).use(sample.peak)
            for before, sample in itertools.pairwise((self.samples[0], *self.samples))
        ]

    def peaks(self) -> dict[PhaseName, Peak]:
        """The highest point of each phase."""
        uses, points = self.uses(), timeline.highest(self.timeline()).values()
        samples = [(self.samples[n], uses[n]) for n in points]
        return {sample.phase: Peak(sample.phase, sample.unit, use) for sample, use in samples}

    def __str__(self) -> str:
        rows = timeline.table(self.timeline())
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows)

    def to_html(self) -> str:
        """A page with a picture, in which categories are stacked over the step, and a table of each phase's
        peak. Raises UsageError where what draws it is not installed: the extra accelz-zero[report]."""
        return timeline.page(self.timeline()).render()

    def save(self, path: str | Path) -> None:
        """Write the page, such as memory.html, and beside it memory.pickle, torch's memory snapshot for
        https://pytorch.org/memory_viz, on devices of which torch keeps one. Ranks that save give names of
        their own. Raises what `to_html` does."""
        page = as_path(path)
        page.write_text(self.to_html(), encoding="utf-8")
        if self.snapshot is not None:
            page.with_suffix(".pickle").write_bytes(pickle.dumps(self.snapshot))

    def timeline(self) -> dict[str, object]:
        """For each sample its phase, unit, seconds and use, as columns of JSON values."""
        uses = [asdict(use) for use in self.uses()]
        of_samples = {n: [getattr(s, n) for s in self.samples] for n in ("seconds", "phase", "unit")}
        of_uses = {each.name: [use[each.name] for use in uses] for each in fields(Use)}
        return {"capacity": self.capacity, "exact": self.exact, **of_samples, **of_uses}
