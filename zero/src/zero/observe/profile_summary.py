"""Where the time of profiled steps went, by the engine's ranges: one page of text."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zero.ranges import PREFIX

COMPUTE, IDLE = "computation", "idle: Python, data, the device's own work"
_KINDS = {
    "wait": "gathers, waited for",
    "gather": "gathers, begun",
    "release": "units released",
    "reduce": "reduces, begun",
    "reduced": "reduces, waited for",
    "step": "optimizer",
    "update": "optimizer",
    "save": "checkpoints",
    "load": "checkpoints",
}
_COPIES = "copies between tiers"
_WAITED = ("wait", "reduced")


@dataclass(frozen=True)
class Span:
    """Something with a name that was done from `begin` to `end`, in seconds."""

    name: str
    begin: float
    end: float

    @property
    def phase(self) -> str:
        return self.name.removeprefix(PREFIX).split(" ")[0]

    @property
    def unit(self) -> str:
        return self.name.removeprefix(PREFIX).partition(" ")[2]

    @property
    def kind(self) -> str:
        if self.phase == "wait" and self.unit == "for disk":
            return _COPIES
        return _KINDS.get(self.phase, _COPIES)


@dataclass(frozen=True)
class Summary:
    """Of so many steps. seconds: of the host, by kind, which add up to the whole. waited: by unit, for
    gathers and reduces. hidden: between the beginning of gathers and the wait for them. device: seconds in
    which a device that works by itself was busy; None if there is none."""

    steps: int
    seconds: dict[str, float]
    waited: dict[str, float]
    hidden: float
    device: float | None

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def __str__(self) -> str:
        lines = [f"{self.steps} steps, {1000 * self.total / self.steps:.1f} ms each", ""]
        lines += [self._row(kind, seconds) for kind, seconds in _most(self.seconds)]
        lines += ["", self._row("gathers under way beside this, added up", self.hidden)]
        if self.device is not None:
            lines.append(self._row("the device was busy", self.device))
        lines += ["", "waited for gathers and reduces, by unit:"]
        lines += [self._row(unit, seconds) for unit, seconds in _most(self.waited)] or ["  nothing"]
        return "\n".join(lines) + "\n"

    def _row(self, what: str, seconds: float) -> str:
        return f"  {1000 * seconds / self.steps:9.2f} ms {seconds / (self.total or 1):6.1%}  {what}"


def summarise(
    ranges: Sequence[Span], operations: Iterable[Span], device: Sequence[Span], steps: int
) -> Summary:
    """ranges: of the engine, on the host. operations: of torch, on the host. device: what ran on a device
    that works by itself."""
    busy = list(union(operations))
    seconds: dict[str, float] = defaultdict(float)
    for (begin, end), span in _innermost(ranges, busy):
        seconds[COMPUTE if span is None else span.kind] += end - begin
    every = [*busy, *((span.begin, span.end) for span in ranges)]
    whole = max(end for _, end in every) - min(begin for begin, _ in every) if every else 0.0
    seconds[IDLE] = max(whole - sum(seconds.values()), 0.0)
    waited: dict[str, float] = defaultdict(float)
    for span in ranges:
        if span.phase in _WAITED and span.kind != _COPIES:
            waited[span.unit] += span.end - span.begin
    occupied = sum(end - begin for begin, end in union(device)) if device else None
    return Summary(steps, dict(seconds), dict(waited), _hidden(ranges), occupied)


def union(spans: Iterable[Span]) -> Iterator[tuple[float, float]]:
    """The time in which there is any of the spans, as stretches in order."""
    begin = end = float("-inf")
    for span in sorted(spans, key=lambda span: span.begin):
        if span.begin > end:
            if end > begin:
                yield begin, end
            begin, end = span.begin, span.end
        end = max(end, span.end)
    if end > begin:
        yield begin, end


def _innermost(
    ranges: Sequence[Span], busy: Sequence[tuple[float, float]]
) -> Iterator[tuple[tuple[float, float], Span | None]]:
    """Stretches of time, each with the range that began last of those around it; None where there are only
    operations. A checkpoint in a thread of its own hides nothing."""
    both = [*ranges, *(Span("", begin, end) for begin, end in busy)]
    moments = sorted({at for span in both for at in (span.begin, span.end)})
    waiting = sorted(both, key=lambda span: span.begin, reverse=True)
    open_: list[tuple[int, float, int, Span]] = []
    for begin, end in itertools.pairwise(moments):
        while waiting and waiting[-1].begin <= begin:
            span = waiting.pop()
            last = 2 if span.kind == "checkpoints" else 1 if not span.name else 0
            heapq.heappush(open_, (last, -span.begin, len(waiting), span))
        while open_ and open_[0][3].end <= begin:
            heapq.heappop(open_)
        if open_:
            yield (begin, end), open_[0][3] if open_[0][3].name else None


def _hidden(ranges: Sequence[Span]) -> float:
    begun: dict[str, float] = {}
    hidden = 0.0
    for span in sorted(ranges, key=lambda span: span.begin):
        if span.phase == "gather":
            begun.setdefault(span.unit, span.end)
        elif span.phase == "wait" and span.unit in begun:
            hidden += max(span.begin - begun.pop(span.unit), 0.0)
        elif span.phase == "release":
            begun.pop(span.unit, None)
    return hidden


def _most(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])
