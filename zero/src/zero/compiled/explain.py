"""What the passes did to each graph, in numbers and as text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import fx

from zero import sizes
from zero.compiled.graphs import ShardedGraph, cast_to, text
from zero.compiled.ops import ALLGATHER, PREFETCH, REDUCE, RELEASE


@dataclass(frozen=True)
class Gather:
    """One gather in a graph. cast: None where parameters travel in their own dtype. ahead: prefetched."""

    unit: str
    cast: torch.dtype | None
    nbytes: int
    ahead: bool


@dataclass(frozen=True)
class GraphReport:
    """One graph, as compiled. kind: "forward", "backward" or "inference". counts: what each pass did, by its
    name. peak: bytes of whole units at the worst place, as the graph orders gathers and releases. code: the
    graph itself."""

    kind: str
    gathers: tuple[Gather, ...]
    counts: dict[str, int]
    reduced: int
    peak: int
    code: str = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffers that a run of the graph gathers, if nothing is there before."""
        return sum(gather.nbytes for gather in self.gathers)


@dataclass(frozen=True)
class Explanation:
    """mode: "graph" (the whole model is one graph) or "units" (each unit by itself). why: what kept it from
    being one graph, or "". graphs: in the order they were compiled. measured_peak: most bytes of whole units
    at one time in a graph, since the engine was made."""

    mode: str
    why: str
    graphs: tuple[GraphReport, ...]
    measured_peak: int

    def __str__(self) -> str:
        if self.mode == "units":
            return f"compiled unit by unit, gathered by the engine's hooks, because: {self.why}"
        lines = [line for report in self.graphs for line in _lines(report)]
        return "\n".join([*lines, f"measured peak of gathered bytes: {sizes.human(self.measured_peak)}"])


def report(graph: ShardedGraph, kind: str, counts: dict[str, int]) -> GraphReport:
    """Read a graph that all passes are done with."""
    ahead = {n.args[2] for n in graph.graph.find_nodes(op="call_function", target=PREFETCH)}
    gathers = tuple(
        Gather(
            graph.facts.units[graph.unit_of(node)].name,
            cast_to(node),
            graph.nbytes(node),
            graph.unit_of(node) in ahead,
        )
        for node in graph.graph.find_nodes(op="call_function", target=ALLGATHER)
    )
    reduced = len(graph.graph.find_nodes(op="call_function", target=REDUCE))
    return GraphReport(kind, gathers, counts, reduced, predicted_peak(graph), text(graph.graph))


def predicted_peak(graph: ShardedGraph) -> int:
    """Most bytes of whole units at one time if the nodes run in their order."""
    whole: dict[int, int] = {}
    peak = 0
    for node in graph.graph.nodes:
        if node.target is ALLGATHER:
            whole[graph.unit_of(node)] = graph.nbytes(node)
        elif node.target is PREFETCH:
            whole[_integer(node)] = graph.facts.units[_integer(node)].nbytes(cast_to(node))
        elif node.target is RELEASE:
            whole.pop(_integer(node), None)
        peak = max(peak, sum(whole.values()))
    return peak


def _integer(node: fx.Node) -> int:
    """The unit of a prefetch or release."""
    unit = node.args[2]
    assert isinstance(unit, int)
    return unit


def _lines(report: GraphReport) -> list[str]:
    casts = Counter(str(g.cast).removeprefix("torch.") for g in report.gathers if g.cast is not None)
    travel = ", ".join(f"{count} in {dtype}" for dtype, count in casts.items()) or "none narrowed"
    done = ", ".join(f"{name} {count}" for name, count in report.counts.items())
    return [
        f"{report.kind}: {len(report.gathers)} gathers of {sizes.human(report.nbytes)} ({travel}), "
        f"{sum(g.ahead for g in report.gathers)} ahead of their use, {report.reduced} gradients reduced, "
        f"predicted peak of gathered bytes {sizes.human(report.peak)}",
        f"  passes: {done}",
    ]
