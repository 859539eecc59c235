"""Device memory over a step: what it was used for, at every point where units come, go or are stepped."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from zero.config.sizes import human
from zero.tiers.device_bytes import DeviceBytes
from zero.tiers.tracer import PhaseName

COLOURS = {
    "parameters": "#4c78a8",
    "gathered": "#72b7b2",
    "gradients": "#f58518",
    "optimizer": "#e45756",
    "activations": "#54a24b",
    "other": "#bab0ac",
    "temporary": "#e7ddd6",
}


@dataclass(frozen=True)
class Use:
    """Bytes of the device by what they are for. The first four: see `DeviceBytes`. activations: what forwards
    have left until their backward is over, and gradients on their way through it. other: what is none of
    these, such as inputs, buffers and what was there before. temporary: taken and given back between two
    points.
    """

    parameters: int
    gathered: int
    gradients: int
    optimizer: int
    activations: int
    other: int
    temporary: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))


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
        held = self.held
        kept = (held.parameters, held.gathered, held.gradients, held.optimizer)
        return Use(*kept, self.activations, self.other, most - self.allocated)


@dataclass(frozen=True)
class Peak:
    """The highest point of a phase. unit: that of the next sample. use: adds up to the peak's bytes."""

    phase: PhaseName
    unit: str
    use: Use


@dataclass(frozen=True)
class MemoryReport:
    """One optimizer step. capacity: bytes that the process may use of the device."""

    samples: tuple[Sample, ...]
    capacity: int

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
        best: dict[PhaseName, Peak] = {}
        for sample, use in zip(self.samples, self.uses(), strict=True):
            if sample.phase not in best or use.total > best[sample.phase].use.total:
                best[sample.phase] = Peak(sample.phase, sample.unit, use)
        return best

    def __str__(self) -> str:
        rows = self._table()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows)

    def to_html(self) -> str:
        """A page with a picture, in which categories are stacked over the step, and a table of each phase's
        peak."""
        legend = "".join(
            f'<span><i style="background:{colour}"></i>{name}</span>' for name, colour in COLOURS.items()
        )
        head, *rows = self._table()
        return _PAGE.format(
            picture=_picture(self.samples, self.uses(), self.peak),
            legend=legend,
            head="".join(f"<th>{html.escape(c)}</th>" for c in head),
            rows="".join(f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in row)}</tr>" for row in rows),
            peak=human(self.peak),
            capacity=human(self.capacity),
        )

    def _table(self) -> list[tuple[str, ...]]:
        """A head, and a row for each phase's peak, to which the categories add up."""
        rows = [
            (phase, human(peak.use.total), *map(human, astuple(peak.use)), peak.unit)
            for phase, peak in self.peaks().items()
        ]
        return [("phase", "peak", *COLOURS, "unit"), *rows]


WIDTH, HEIGHT = 960, 320


def _picture(samples: Sequence[Sample], uses: Sequence[Use], top: int) -> str:
    """Stacked areas over time: from one sample to the next, the peak between them."""
    duration = samples[-1].seconds
    xs = [round(WIDTH * sample.seconds / (duration or 1.0), 1) for sample in samples]
    floor = [0] * len(uses)
    shapes = []
    for category, colour in COLOURS.items():
        ceiling = [low + max(getattr(use, category), 0) for low, use in zip(floor, uses, strict=True)]
        points = [*_stairs(xs, ceiling), *reversed(_stairs(xs, floor))]
        shapes.append(f'<polygon fill="{colour}" points="{_path(points, top)}"/>')
        floor = ceiling
    for x, (before, after) in zip(xs, itertools.pairwise(samples), strict=False):
        if before.phase != after.phase:
            shapes.append(_boundary(x, after.phase))
    shapes.append(f'<text x="{WIDTH - 4}" y="14" text-anchor="end">{1000 * duration:.1f} ms</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%">{"".join(shapes)}</svg>'


def _stairs(xs: Sequence[float], heights: Sequence[int]) -> list[tuple[float, int]]:
    """The height that each sample reports, all the way from the sample before it."""
    spans = zip(itertools.pairwise(xs), heights[1:], strict=True)
    return [(x, height) for span, height in spans for x in span]


def _boundary(x: float, phase: PhaseName) -> str:
    line = f'<line x1="{x}" x2="{x}" y1="0" y2="{HEIGHT}" stroke="#999" stroke-dasharray="4"/>'
    return f'{line}<text x="{x + 4}" y="14">{phase}</text>'


def _path(points: Sequence[tuple[float, int]], top: int) -> str:
    return " ".join(f"{x},{HEIGHT * (1 - y / max(top, 1)):.1f}" for x, y in points)


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Device memory over a step</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 2em auto; max-width: 62em }}
table {{ border-collapse: collapse; margin-top: 1em }}
td, th {{ padding: 0.2em 0.8em; text-align: right; border-bottom: 1px solid #ddd }}
span {{ margin-right: 1.2em }}
i {{ display: inline-block; width: 0.9em; height: 0.9em; margin-right: 0.3em }}
svg {{ border-left: 1px solid #999; border-bottom: 1px solid #999 }}
</style>
<h1>Device memory over a step</h1>
<p>Peak {peak} of {capacity}. The most in use between samples, by category. Samples are taken when units are
gathered, released or stepped; temporary is what was freed again before the next sample.</p>
{picture}
<p>{legend}</p>
<table><tr>{head}</tr>{rows}</table>
</html>
"""
