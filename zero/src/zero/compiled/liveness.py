"""How much memory a graph takes, node by node, from the sizes of its fake tensors.

storage  the memory of a node's value; for a view, the storage of what it may be a view of. It is there from
         its node to its last reader.

Whole units, gradients and optimizer state are the engine's: they come and go with operations of their own,
and views of them take nothing. What a graph is called with stays while it runs, except in a backward, where
saved values go after their last use.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Container, Iterable

import torch
from torch import fx

from accelz import HOST
from zero.compiled.graphs import ShardedGraph, begun_by, is_alias, outputs, unit_of
from zero.compiled.ops import (
    OFFLOAD_OPTIMIZER,
    REDUCE,
    RELEASE,
    RELOAD_OPTIMIZER,
    WAIT,
    WAIT_OFFLOAD_OPTIMIZER,
)


def peak_of(graph: ShardedGraph, inputs_go: bool) -> int:
    """Most bytes at one time if the nodes run in their present order. inputs_go: whether inputs go after
    their last use, as in a backward."""
    return Liveness(graph, inputs_go).peak_of(graph.graph.nodes)


class Liveness:
    """The memory that one graph takes, in any order of its nodes.

    storages: for each node, those whose memory its value may be. touched: those that it reads, writes or
    makes.
    """

    def __init__(self, graph: ShardedGraph, inputs_go: bool) -> None:
        self._inputs = graph.graph.find_nodes(op="placeholder")
        self.storages = _storages(graph.graph)
        values = {n for n, storages in self.storages.items() if storages == {n}} - graph.parameters.keys()
        counted = _counted(self._inputs)
        self._own = {n: bytes_of(n, counted) if n in values else 0 for n in self.storages}
        nodes = self.storages
        self.touched = {n: {s for i in (*n.all_input_nodes, n) for s in nodes[i]} for n in nodes}
        held = self.touched[outputs(graph.graph)] | (set() if inputs_go else set(self._inputs))
        self._touches = Counter(s for touched in self.touched.values() for s in touched if s not in held)
        self._comes, self._goes = _engine_bytes(graph)

    def start(self) -> Live:
        """A run before its first node, when the inputs are there."""
        return Live(self, sum(self._own[n] for n in self._inputs))

    def peak_of(self, order: Iterable[fx.Node]) -> int:
        """Most bytes at one time in this order of all nodes."""
        live = self.start()
        for node in order:
            live.run(node)
        return live.peak

    def during(self, order: Iterable[fx.Node]) -> dict[fx.Node, int]:
        """Bytes in use while each node runs, in this order of all nodes."""
        live, found = self.start(), {}
        for node in order:
            found[node] = live.nbytes + self.taken(node)
            live.run(node)
        return found

    def taken(self, node: fx.Node) -> int:
        """Bytes that come into being with a node."""
        own = 0 if node.op == "placeholder" else self._own[node]
        return own + self._comes[node]

    def given_back(self, node: fx.Node, left: Counter[fx.Node]) -> int:
        """Bytes that go after a node. left: for each storage, how many nodes that touch it have not run yet,
        this one included."""
        return self._goes[node] + sum(self._own[s] for s in self.touched[node] if left[s] == 1)


class Live:
    """A run of a graph. nbytes: there now. peak: the most so far."""

    def __init__(self, liveness: Liveness, nbytes: int) -> None:
        self.nbytes = self.peak = nbytes
        self._liveness = liveness
        self._left = Counter(liveness._touches)

    def would(self, node: fx.Node) -> tuple[int, int]:
        """Bytes by which running `node` next would raise the peak, and bytes that would be there afterwards
        in addition."""
        taken = self._liveness.taken(node)
        left = taken - self._liveness.given_back(node, self._left)
        return max(self.nbytes + taken - self.peak, 0), left

    def run(self, node: fx.Node) -> None:
        higher, left = self.would(node)
        self.peak += higher
        self.nbytes += left
        self._left.subtract(self._liveness.touched[node])


def _storages(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """For each node, the nodes whose memory its value may be. Each result of one operation has memory of its
    own."""
    found: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        aliased = [found[i] for i in node.all_input_nodes if node.op != "output" and is_alias(node, i)]
        one_of_several = node.target is operator.getitem and aliased == [{node.all_input_nodes[0]}]
        found[node] = set().union(*aliased) if aliased and not one_of_several else {node}
    return found


def _counted(inputs: Iterable[fx.Node]) -> set[str]:
    """Types of the devices that a graph works on; the host counts only where there is no other."""
    values = (n.meta.get("val") for n in inputs)
    types = {v.device.type for v in values if isinstance(v, torch.Tensor)}
    return types - {HOST.type} or {HOST.type}


def bytes_of(node: fx.Node, device_types: Container[str] = ()) -> int:
    """Bytes of a node's tensor, with the sizes that a dynamic shape had when it was traced; 0 for anything
    else.

    device_types: those whose tensors count; empty for all.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or (device_types and value.device.type not in device_types):
        return 0
    return hint(value.numel()) * value.dtype.itemsize


def hint(size: int | torch.SymInt) -> int:
    """A size; for a dynamic one, what it was when it was traced, without adding a guard on it."""
    return size if isinstance(size, int) else size.node.hint or 0


def _engine_bytes(graph: ShardedGraph) -> tuple[Counter[fx.Node], Counter[fx.Node]]:
    """What the engine takes and gives back at a node."""
    comes: Counter[fx.Node] = Counter()
    goes: Counter[fx.Node] = Counter()
    _count_units(graph, comes, goes)
    _count_gradients(graph, comes, goes)
    _count_optimizer(graph, comes, goes)
    return comes, goes


def _count_units(graph: ShardedGraph, comes: Counter[fx.Node], goes: Counter[fx.Node]) -> None:
    whole: dict[int, int] = {}
    for node in graph.graph.nodes:
        for unit, dtype in begun_by(node):
            whole[unit] = graph.facts.units[unit].nbytes(dtype)
            comes[node] += graph.facts.units[unit].nbytes_ahead(dtype)
        if node.target is WAIT:
            coded = graph.facts.units[graph.unit_of(node)].nbytes_coded
            comes[node] += graph.nbytes(node) - graph.nbytes_ahead(node) + coded
            goes[node] += coded
        if node.target is RELEASE and not (len(node.args) > 3 and node.args[3]):
            goes[node] = whole.get(unit_of(node), 0)


def _count_gradients(graph: ShardedGraph, comes: Counter[fx.Node], goes: Counter[fx.Node]) -> None:
    """A unit's gradients are whole from the first of them until those of the next unit travel; then a slice
    may stay."""
    gradients: dict[int, list[fx.Node]] = {}
    for node in graph.graph.find_nodes(op="call_function", target=REDUCE):
        unit = graph.facts.parameters[node.args[2]].unit
        gradients[unit] = [*gradients.pop(unit, []), node]
    ends = [nodes[-1] for nodes in gradients.values()]
    for (unit, nodes), end in zip(gradients.items(), [*ends[1:], outputs(graph.graph)], strict=False):
        nbytes, slices = sum(bytes_of(n.all_input_nodes[0]) for n in nodes), graph.facts.units[unit].slices
        comes[nodes[0]] += nbytes
        goes[end] += nbytes - (nbytes // slices if slices else 0)


def _count_optimizer(graph: ShardedGraph, comes: Counter[fx.Node], goes: Counter[fx.Node]) -> None:
    """State stays from where it is brought; what a forward sends is there beforehand."""
    near: set[int] = set()
    for node in graph.graph.nodes:
        if node.target in (RELOAD_OPTIMIZER, OFFLOAD_OPTIMIZER):
            near.update(node.args[2])
            comes[node] += streamed_bytes(graph, node.args[2])
        if node.target is WAIT_OFFLOAD_OPTIMIZER:
            goes[node] += streamed_bytes(graph, near.intersection(node.args[2]))


def streamed_bytes(graph: ShardedGraph, units: Iterable[int]) -> int:
    """Bytes of the units' optimizer state that come to the device for the step."""
    return sum(graph.facts.units[unit].streamed for unit in units)
