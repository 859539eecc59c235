"""Cuts a graph into segments that a device graph can hold, and what has to be called between them.

A segment is a run of operations that only compute, on tensors of the device: what it does depends on the
addresses and the values of its inputs alone. An operation that draws random numbers is a segment of its own,
and so is a custom one; neither is captured. Between segments stand the engine's operations, collectives, and
what writes to its inputs, works on the host, or has a result whose shape depends on values.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from zero.compiled.graphs import called, is_alias, writes
from zero.compiled.ops import REDUCE, RELEASE


@dataclass(frozen=True)
class Segment:
    """A segment of a graph. name: of the attribute that the graph calls for it, with inputs like `inputs`; it
    returns a list. fed: the number of the segment that makes an input, by the input's place; others come from
    the graph's inputs and from operations between segments. called: whether it is not captured. unread: the
    places of inputs that it does not read, states of generators for attention without dropout.
    """

    name: str
    module: fx.GraphModule
    inputs: tuple[Any, ...]
    fed: dict[int, int]
    called: bool
    unread: frozenset[int]


_STAY_OUT = {
    torch.Tag.cudagraph_unsafe,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}
_COMPUTING = {"aten", "prims"}
_ENGINE = {"zero", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}
_STATES = {"philox_seed", "philox_offset", "rng_state", "unused"}
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_HIGHER_ORDER = {"flex_attention", "flex_attention_backward", "triton_kernel_wrapper_functional"}


def cut(module: fx.GraphModule, device: str) -> list[Segment]:
    """Replace segments of the graph by calls; returns them, in order.

    Releases, and gradients that are not a unit's last, wait for the end of a segment, so that few operations
    cut one. device: the type of the device that segments compute on.
    """
    _gather_results(module.graph)
    _defer(module.graph, device)
    runs = _runs(module.graph, device)
    home = {node: number for number, run in enumerate(runs) for node in run}
    made: dict[fx.Node, int] = {}
    segments = [_replace(module, run, number, home, made, device) for number, run in enumerate(runs)]
    for node in reversed(module.graph.nodes):
        if is_view(node) and not node.users:
            module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()
    return segments


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at the memory of its one tensor in another way."""
    operation, _ = called(node)
    sources = _tensors(node)
    if node.op != "call_function" or operation is None or len(sources) != 1 or not computes(node):
        return False
    return isinstance(_value(node), Tensor) and is_alias(node, sources[0])


def computes(node: fx.Node) -> bool:
    """Whether a node may be part of a segment, if its tensors are on the device."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name() in _HIGHER_ORDER
    if isinstance(target, torch._ops.OpOverload):
        mutable = target._schema.is_mutable
        return target.namespace in _COMPUTING and not mutable and _STAY_OUT.isdisjoint(target.tags)
    if target is operator.getitem:
        return computes(node.all_input_nodes[0])
    return isinstance(_value(node), _NUMBERS)


def is_called(node: fx.Node, device: str) -> bool:
    """Whether a node is a segment by itself that is not captured: because it draws random numbers, as
    attention does with dropout, or because nothing is known of it but that it computes from its inputs."""
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload) or not _is_on(node, device):
        return False
    if operation.namespace in _ENGINE or not _STAY_OUT.isdisjoint(operation.tags):
        return False
    if any(
        each.alias_info is not None for each in (*operation._schema.arguments, *operation._schema.returns)
    ):
        return False
    draws = torch.Tag.nondeterministic_seeded in operation.tags and _named(node).get("dropout_p") != 0.0
    return draws or operation.namespace not in _COMPUTING


def written_inputs(graph: fx.Graph) -> set[fx.Node]:
    """The graph's inputs that it writes to."""
    placeholders = graph.find_nodes(op="placeholder")
    return {node for node in placeholders if any(writes(u, node) for u in node.users if u.op != "output")}


def _gather_results(graph: fx.Graph) -> None:
    """Put the results of an operation that has several right behind it."""
    for node in reversed(list(graph.find_nodes(op="call_function", target=operator.getitem))):
        node.all_input_nodes[0].append(node)


def _defer(graph: fx.Graph, device: str) -> None:
    waiting: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.target is RELEASE or (node.target is REDUCE and not node.args[3]):
            waiting.append(node)
        elif _cuts(node, device):
            for each in waiting:
                node.prepend(each)
            waiting = []


def _cuts(node: fx.Node, device: str) -> bool:
    """Whether no segment goes on past a node."""
    if node.op in ("placeholder", "get_attr") or node.target is operator.getitem:
        return False
    if is_called(node, device):
        return False
    return not (node.op == "call_function" and computes(node) and _is_on(node, device))


def _is_on(node: fx.Node, device: str) -> bool:
    """Whether all tensors that a node reads and makes are on the device."""
    values = [_value(each) for each in (node, *node.all_input_nodes)]
    flat = [v for value in values for v in (value if isinstance(value, (list, tuple)) else (value,))]
    return all(v.device.type == device for v in flat if isinstance(v, Tensor))


def _runs(graph: fx.Graph, device: str) -> list[list[fx.Node]]:
    """The nodes of each segment. A view of what another segment has made is in none: whoever reads it makes
    it again, so that no segment has a result in memory that is not its own."""
    runs: list[list[fx.Node]] = [[]]
    home: dict[fx.Node, int] = {}  # the number of the run that a node is in
    for node in graph.nodes:
        if _cuts(node, device):
            runs.append([])
        elif is_called(node, device):
            found = [node, *(user for user in node.users if user.target is operator.getitem)]
            home |= dict.fromkeys(found, len(runs))
            runs += [found, []]
        elif node.op == "call_function" and computes(node) and node not in home:
            open_ = len(runs) - 1
            if not is_view(node) or home.get(_tensors(node)[0]) == open_:
                home[node] = open_
                runs[open_].append(node)
    return [run for run in runs if not all(isinstance(_value(node), _NUMBERS) for node in run)]


def _replace(
    module: fx.GraphModule,
    run: list[fx.Node],
    number: int,
    home: dict[fx.Node, int],
    made: dict[fx.Node, int],
    device: str,
) -> Segment:
    """Make a run of nodes a module of its own, called at the place of the last. made: nodes for what segments
    have made, with the segment."""
    inside = set(run)
    again: dict[fx.Node, None] = {}  # views, to be made inside
    inputs: dict[fx.Node, None] = {}

    def need(node: fx.Node) -> None:
        if node in inside or node.op == "get_attr" or node in again or node in inputs:
            return
        if is_view(node) and node not in home:
            for source in node.all_input_nodes:
                need(source)
            again[node] = None
        else:
            inputs[node] = None

    for node in run:
        for source in node.all_input_nodes:
            need(source)
    graph = fx.Graph()
    copies = {node: _placeholder(graph, node) for node in inputs}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    for node in (*again, *run):
        copied(node)
    results = [node for node in run if any(user not in inside for user in node.users)]
    graph.output([copies[node] for node in results])
    segment, name = fx.GraphModule(module, graph), f"segment_{number}"
    fed = {place: made[node] for place, node in enumerate(inputs) if node in made}
    unread = frozenset(place for place, node in enumerate(inputs) if _is_unread(node, inside))
    values = tuple(map(_value, inputs))
    module.add_submodule(name, segment)
    with module.graph.inserting_after(run[-1]):
        call = module.graph.call_module(name, tuple(inputs))
    for index, node in reversed(list(enumerate(results))):
        with module.graph.inserting_after(call):
            taken = module.graph.call_function(operator.getitem, (call, index))
        taken.meta, made[taken] = dict(node.meta), number
        node.replace_all_uses_with(taken, lambda user: user not in inside)
    for node in reversed(run):
        module.graph.erase_node(node)
    return Segment(name, segment, values, fed, is_called(run[0], device), unread)


def _is_unread(value: fx.Node, readers: set[fx.Node]) -> bool:
    """Whether all that `readers` take a value for is a state of random numbers that they do not draw."""
    taken = [_named(node) for node in value.users if node in readers]
    states = all(given.get(name) is not value or name in _STATES for given in taken for name in given)
    return bool(taken) and states and all(given.get("dropout_p") == 0.0 for given in taken)


def _named(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator's call by name, with defaults."""
    operation, arguments = called(node)
    if operation is None:
        return {}
    schema = operation._schema.arguments
    defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
    return defaults | {each.name: v for each, v in zip(schema, arguments, strict=False)} | node.kwargs


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    placeholder = graph.placeholder(node.name)
    placeholder.meta = dict(node.meta)
    return placeholder


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if isinstance(_value(source), Tensor)]


def _value(node: fx.Node) -> Any:
    """What the node is for the compiler: a fake tensor, a number, several of them; a constant itself."""
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(node.graph.owning_module)
    return node.meta.get("val")
