"""What the passes did to each graph, in numbers and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zero.compiled.graphs import ShardedGraph, begun_by, text, travels_in, unit_of
from zero.compiled.liveness import peak_of
from zero.compiled.ops import REDUCE, RELEASE
from zero.compiled.persistence import PersistCandidate
from zero.compiled.replays import Count
from zero.config import sizes

IN_BYTES = frozenset({"list_schedule"})
"""Passes that report by how many bytes the predicted peak fell; the others count what they changed."""


@dataclass(frozen=True)
class Gather:
    """One gather in a graph. dtype: the one that fp32 parameters are gathered in. nbytes: of the whole
    values. travelling: bytes of what stands for them on the way. ahead: whether it begins ahead of its use.
    """

    unit: str
    dtype: torch.dtype
    nbytes: int
    travelling: int
    ahead: bool


@dataclass(frozen=True)
class GraphReport:
    """One graph, as compiled. kind: "forward", "backward" or "inference". counts: what each pass did, by its
    name; see `IN_BYTES`. peak: most bytes of whole units at one time, as the graph orders gathers and
    releases. live: most bytes of those and of all other values. code: the graph itself.
    """

    kind: str
    gathers: tuple[Gather, ...]
    counts: dict[str, int]
    reduced: int
    peak: int
    live: int
    code: str = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffers that a run of the graph gathers if nothing is there beforehand."""
        return sum(gather.nbytes for gather in self.gathers)


@dataclass(frozen=True)
class Explanation:
    """How a model was compiled.

    mode: "graph" (the whole model is one graph) or "units" (each unit by itself). why: what kept it from
        being one graph, or "".
    graphs: in the order in which they were compiled.
    measured_peak: most bytes of whole units at one time in a graph since the engine was made.
    room: bytes for units that persist; None if that is not decided, or not wanted. persistent: those units,
        worth most first.
    not_generated: why inductor could not compile some graph, whose operations run one by one; or "".
    replays: what has been captured and replayed, with `Compile(graphs=True)`; else None.
    """

    mode: str
    why: str
    graphs: tuple[GraphReport, ...]
    measured_peak: int
    room: int | None = None
    persistent: tuple[PersistCandidate, ...] = ()
    not_generated: str = ""
    replays: Count | None = None

    def __str__(self) -> str:
        without = [f"not all code was generated, because: {self.not_generated}"] if self.not_generated else []
        if self.mode == "units":
            by_units = f"compiled unit by unit, gathered by the engine's hooks, because: {self.why}"
            return "\n".join([by_units, *without])
        lines = [*without, *(line for report in self.graphs for line in _lines(report))]
        if self.room is not None:
            lines.append(_kept(self.room, self.persistent))
        if self.replays is not None:
            lines.append(_replayed(self.replays))
        return "\n".join([*lines, f"measured peak of gathered bytes: {sizes.human(self.measured_peak)}"])


def report(graph: ShardedGraph, kind: str, counts: dict[str, int]) -> GraphReport:
    """Report on a graph that all passes are done with."""
    on_demand = graph.begins()
    gathers = []
    for node in graph.waits():
        unit, sizes = graph.unit_of(node), (graph.nbytes(node), graph.nbytes_ahead(node))
        name = graph.facts.units[unit].name
        gathers.append(Gather(name, travels_in(node), *sizes, unit not in on_demand))
    reduced = len(graph.graph.find_nodes(op="call_function", target=REDUCE))
    live = peak_of(graph, inputs_go=kind == "backward")
    return GraphReport(kind, tuple(gathers), counts, reduced, predicted_peak(graph), live, text(graph.graph))


def predicted_peak(graph: ShardedGraph) -> int:
    """Most bytes of whole units at one time if the nodes run in their present order."""
    whole: dict[int, int] = {}
    peak = 0
    for node in graph.graph.nodes:
        whole |= {unit: graph.facts.units[unit].nbytes(dtype) for unit, dtype in begun_by(node)}
        if node.target is RELEASE:
            whole.pop(unit_of(node), None)
        peak = max(peak, sum(whole.values()))
    return peak


def _replayed(count: Count) -> str:
    done = f"{count.captured} of {count.segments} segments captured, {sizes.human(count.nbytes)} kept"
    often = f"segments replayed {count.replayed} times, called {count.called} times"
    failed = f"; not all can be, because: {count.failed}" if count.failed else ""
    return f"graphs: {done}; {often}{failed}"


def _kept(room: int, persistent: Sequence[PersistCandidate]) -> str:
    names = ", ".join(f"{c.unit} ({sizes.human(c.nbytes)})" for c in persistent) or "nothing"
    saved = sum(c.saved * c.seconds for c in persistent)
    return (
        f"kept gathered until the weights change, within {sizes.human(room)}: {names}; saves "
        f"{saved * 1e3:.3g} ms of gathers per step"
    )


def _lines(report: GraphReport) -> list[str]:
    narrowed = (g.dtype for g in report.gathers if g.dtype is not torch.float32)
    casts = Counter(str(dtype).removeprefix("torch.") for dtype in narrowed)
    travel = ", ".join(f"{count} in {dtype}" for dtype, count in casts.items()) or "none narrowed"
    travelling = sum(gather.travelling for gather in report.gathers)
    if travelling < report.nbytes:
        travel += f", travelling as {sizes.human(travelling)} of codes, scales and vectors"
    done = ", ".join(f"{n} {sizes.human(c) if n in IN_BYTES else c}" for n, c in report.counts.items())
    return [
        f"{report.kind}: {len(report.gathers)} gathers of {sizes.human(report.nbytes)} ({travel}), "
        f"{sum(g.ahead for g in report.gathers)} ahead of their use, {report.reduced} gradients reduced, "
        f"predicted peak {sizes.human(report.live)}, of gathered bytes {sizes.human(report.peak)}",
        f"  passes: {done}",
    ]
