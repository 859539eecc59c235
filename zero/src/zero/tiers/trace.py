"""Device memory over a step: what it was used for, at every point where units come and go."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from zero.sizes import human

PhaseName = Literal["forward", "backward", "step"]
COLOURS = {
    "parameters": "#4c78a8",
    "gathered": "#72b7b2",
    "gradients": "#f58518",
    "optimizer": "#e45756",
    "other": "#bab0ac",
}


@dataclass(frozen=True)
class Held:
    """Bytes of the device that the engine holds. parameters: shards, and whole buffers that stay. gathered:
    whole buffers in use. gradients: whole buffers and slices. optimizer: masters and moments."""

    parameters: int = 0
    gathered: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gathered + self.gradients + self.optimizer

    def __add__(self, other: Held) -> Held:
        return Held(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Sample:
    """A point in a step. unit: that comes or goes ("" for none). seconds: since the step began. held: at the
    point. allocated: at the point. peak: the most since the point before. away: bit i is set where group i
    has, or in "step" had, a reduced gradient that has left the device."""

    phase: PhaseName
    unit: str
    seconds: float
    held: Held
    allocated: int
    peak: int
    away: int

    @property
    def other(self) -> int:
        """Activations, what the model's own operations need, and what is not the engine's."""
        return self.allocated - self.held.total


@dataclass(frozen=True)
class MemoryReport:
    """One optimizer step. capacity: bytes that the process may use of the device."""

    samples: tuple[Sample, ...]
    capacity: int

    @property
    def peak(self) -> int:
        """Most bytes of the device in use at one time."""
        return max(sample.peak for sample in self.samples)

    @property
    def peak_other(self) -> int:
        """Most bytes in use for what is not model state: activations and temporary values."""
        return max(max(s.other, s.peak - s.held.total) for s in self.samples)

    def peaks(self) -> dict[PhaseName, Sample]:
        """The sample of the highest peak of each phase."""
        best: dict[PhaseName, Sample] = {}
        for sample in self.samples:
            if sample.phase not in best or sample.peak > best[sample.phase].peak:
                best[sample.phase] = sample
        return best

    def __str__(self) -> str:
        rows = [("phase", "peak", *COLOURS, "unit")]
        for phase, s in self.peaks().items():
            rows.append((phase, human(s.peak), *(human(n) for n in _parts(s)), s.unit))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows)

    def to_html(self) -> str:
        """A page with the picture, categories stacked over the step, and the table of each phase's peak."""
        legend = "".join(
            f'<span><i style="background:{colour}"></i>{name}</span>' for name, colour in COLOURS.items()
        )
        head = ("phase", "peak", *COLOURS, "unit")
        rows = [
            (phase, human(s.peak), *(human(n) for n in _parts(s)), s.unit)
            for phase, s in self.peaks().items()
        ]
        return _PAGE.format(
            picture=_picture(self.samples, self.peak),
            legend=legend,
            head="".join(f"<th>{html.escape(c)}</th>" for c in head),
            rows="".join(f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in row)}</tr>" for row in rows),
            peak=human(self.peak),
            capacity=human(self.capacity),
        )


def _parts(sample: Sample) -> tuple[int, ...]:
    """Bytes by category, in the order of COLOURS."""
    held = sample.held
    return held.parameters, held.gathered, held.gradients, held.optimizer, sample.other


WIDTH, HEIGHT = 960, 320


def _picture(samples: Sequence[Sample], top: int) -> str:
    """Stacked areas, one column a sample; the line is the peak since the sample before."""
    xs = [round(WIDTH * n / max(len(samples) - 1, 1), 1) for n in range(len(samples))]
    floor = [0.0] * len(samples)
    shapes = []
    for index, colour in enumerate(COLOURS.values()):
        ceiling = [low + max(_parts(s)[index], 0) for low, s in zip(floor, samples, strict=True)]
        points = [*zip(xs, ceiling, strict=True), *reversed(list(zip(xs, floor, strict=True)))]
        shapes.append(f'<polygon fill="{colour}" points="{_path(points, top)}"/>')
        floor = ceiling
    line = _path(list(zip(xs, [float(s.peak) for s in samples], strict=True)), top)
    shapes.append(f'<polyline fill="none" stroke="#333" points="{line}"/>')
    for x, before, after in zip(xs[1:], samples, samples[1:], strict=False):
        if before.phase != after.phase:
            shapes.append(
                f'<line x1="{x}" x2="{x}" y1="0" y2="{HEIGHT}" stroke="#999" stroke-dasharray="4"/>'
            )
            shapes.append(f'<text x="{x + 4}" y="14">{after.phase}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%">{"".join(shapes)}</svg>'


def _path(points: Sequence[tuple[float, float]], top: int) -> str:
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
<p>Peak {peak} of {capacity}. The line is the most in use between two points; areas are what it is for.</p>
{picture}
<p>{legend}</p>
<table><tr>{head}</tr>{rows}</table>
</html>
"""
