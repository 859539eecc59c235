"""Reading graphs: which nodes are parameters, which nodes read their memory, and what is a cast.

reader   a node that reads a value's memory, directly or through views.
alias    a node whose output may be a view of a value: views, and whatever does not declare that it is none.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._prims import rng_prims

from zero.compiled.facts import Facts, ParameterFacts
from zero.compiled.ops import ALLGATHER, PREFETCH, RELEASE, WAIT

aten = torch.ops.aten

# How a cast is written before and after a compiler's decompositions.
_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_CAST_DETAILS = {"layout", "device", "dtype"}  # which say nothing new about a strided tensor on its device


class ShardedGraph:
    """A forward, backward or inference graph, some of whose inputs are the engine's parameters.

    parameters: their placeholders.
    """

    def __init__(self, module: fx.GraphModule, facts: Facts, parameters: dict[str, ParameterFacts]) -> None:
        self.module = module
        self.graph = module.graph
        self.facts = facts
        self._by_name = parameters

    @property
    def parameters(self) -> dict[fx.Node, ParameterFacts]:
        placeholders = self.graph.find_nodes(op="placeholder")
        return {n: self._by_name[n.name] for n in placeholders if n.name in self._by_name}

    def by_unit(self) -> dict[int, list[fx.Node]]:
        """Placeholders of the parameters that must be gathered, by unit."""
        found: dict[int, list[fx.Node]] = {}
        for node, parameter in self.parameters.items():
            if not self.facts.units[parameter.unit].resident:
                found.setdefault(parameter.unit, []).append(node)
        return found

    def derived(self) -> dict[fx.Node, fx.Node]:
        """Nodes that depend on nothing but one sharded parameter, in order, each with that parameter."""
        roots = {n: n for nodes in self.by_unit().values() for n in nodes}
        found: dict[fx.Node, fx.Node] = dict(roots)
        for node in self.graph.nodes:
            sources = {found.get(i) for i in node.all_input_nodes}
            if node.op == "call_function" and len(sources) == 1 and not node.is_impure():
                (root,) = sources
                if root is not None:
                    found[node] = root
        return {node: root for node, root in found.items() if node not in roots}

    def waits(self) -> list[fx.Node]:
        """Where gathered values begin to be used: one node per unit, in order."""
        return list(self.graph.find_nodes(op="call_function", target=WAIT))

    def begins(self) -> dict[int, fx.Node]:
        """The node that begins each unit's gather if nothing begins it ahead, by the unit's index."""
        return {unit_of(n): n for n in self.graph.find_nodes(op="call_function", target=ALLGATHER)}

    def releases(self) -> dict[int, fx.Node]:
        """The release of each unit, by the unit's index."""
        return {unit_of(n): n for n in self.graph.find_nodes(op="call_function", target=RELEASE)}

    def unit_of(self, wait: fx.Node) -> int:
        """The index of the unit that `wait` waits for."""
        numbers: Any = wait.args[2]
        parameter: ParameterFacts = self.facts.parameters[numbers[0]]
        return parameter.unit

    def nbytes_ahead(self, wait: fx.Node) -> int:
        """Bytes in use from the beginning of the gather until it is waited for."""
        return self.facts.units[self.unit_of(wait)].nbytes_ahead(travels_in(wait))

    def nbytes(self, wait: fx.Node) -> int:
        """Bytes of the buffer whose values are waited for."""
        return self.facts.units[self.unit_of(wait)].nbytes(travels_in(wait))

    def call(self, operation: torch._ops.OpOverload, *arguments: Any) -> fx.Node:
        """Insert a node at the graph's insertion point, named after the operation."""
        return self.graph.create_node("call_function", operation, arguments, name=operation._opname)

    def positions(self) -> dict[fx.Node, int]:
        """Each node's place in the order of execution."""
        return {node: index for index, node in enumerate(self.graph.nodes)}

    def finish(self) -> None:
        """Check the graph and regenerate the module after changes."""
        self.graph.lint()
        self.module.recompile()


def is_alias(node: fx.Node, source: fx.Node) -> bool:
    """Whether `node`'s output may be a view of `source`, one of its inputs."""
    operation, _ = called(node)
    if operation is None:
        return node.op != "output"
    if not any(r.alias_info is not None for r in operation._schema.returns):
        return False
    return any(argument.alias_info is not None for argument in _arguments_of(node, source))


def writes(node: fx.Node, source: fx.Node) -> bool:
    """Whether `node` writes to its input `source`."""
    infos = (argument.alias_info for argument in _arguments_of(node, source))
    return any(info is not None and info.is_write for info in infos)


def _arguments_of(node: fx.Node, source: fx.Node) -> Iterator[torch._C.Argument]:
    """The arguments in the operator's schema that `source` is passed as."""
    operation, arguments = called(node)
    if operation is not None:
        schema = operation._schema
        given = {a.name: v for a, v in zip(schema.arguments, arguments, strict=False)} | node.kwargs
        yield from (a for a in schema.arguments if source in _flat(given.get(a.name)))


def called(node: fx.Node) -> tuple[torch._ops.OpOverload | None, tuple[Any, ...]]:
    """The operator that a node calls, and its positional arguments; also where the call is wrapped to save or
    to set a generator's state. None for anything else."""
    target, arguments = node.target, node.args
    if target is rng_prims.run_with_rng_state:  # the state, the operator, its arguments
        target, arguments = arguments[1], arguments[2:]  # type: ignore[assignment]
    elif target in (rng_prims.run_and_save_rng_state, rng_prims.graphsafe_run_with_rng_state):
        target, arguments = arguments[0], arguments[1:]  # type: ignore[assignment]
    return (target if isinstance(target, torch._ops.OpOverload) else None), arguments


def readers(value: fx.Node) -> Iterator[fx.Node]:
    """Every node that reads `value`'s memory, including its aliases, but not the graph's output."""
    seen: set[fx.Node] = set()
    waiting = [value]
    while waiting:
        source = waiting.pop()
        for user in source.users:
            if user.op == "output" or user in seen:
                continue
            seen.add(user)
            yield user
            if is_alias(user, source):
                waiting.append(user)


def cast_of(node: fx.Node) -> torch.dtype | None:
    """The dtype that `node` casts its only tensor to; None if it does anything else."""
    if node.target not in _CASTS:
        return None
    if node.target is aten._to_copy.default:
        dtype = node.kwargs.get("dtype") if set(node.kwargs) <= _CAST_DETAILS else None
    else:
        dtype = node.args[1]
    return dtype if isinstance(dtype, torch.dtype) else None


def is_generator_state(node: fx.Node) -> bool:
    """Whether a node is the state that a random operation found, beside the operation's result.

    It is a tensor of the host that no operation has computed, and a real one even where the compiler
    traces the graph with fake tensors. So it must not become an argument of an operation that has others.
    """
    if node.target is not operator.getitem or node.args[1] != 0:
        return False
    return node.all_input_nodes[0].target is rng_prims.run_and_save_rng_state


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype of a node's value; None if it is no tensor."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def travels_in(gather: fx.Node) -> torch.dtype:
    """The dtype that fp32 parameters travel in. gather: the node that begins the gather, or the one that
    waits for it."""
    dtype: Any = gather.args[3]
    assert isinstance(dtype, torch.dtype)
    return dtype


def begun_by(node: fx.Node) -> list[tuple[int, torch.dtype]]:
    """The gathers that a node begins: each unit, and the dtype that its fp32 parameters travel in."""
    if node.target is ALLGATHER:
        return [(unit_of(node), travels_in(node))]
    if node.target is PREFETCH:
        units, dtypes = node.args[2:4]
        return list(zip(units, dtypes, strict=True))  # type: ignore[arg-type]
    return []


def unit_of(node: fx.Node) -> int:
    """The index of the unit that a node begins to gather, or releases."""
    unit = node.args[2]
    assert isinstance(unit, int)
    return unit


def last_value(wait: fx.Node) -> fx.Node:
    """The last of the values that `wait` waits for."""
    return list(wait.users)[len(wait.all_input_nodes) - 1]


def outputs(graph: fx.Graph) -> fx.Node:
    """The graph's output node."""
    node: fx.Node = next(iter(graph.find_nodes(op="output")))
    return node


def text(graph: fx.Graph) -> str:
    """The graph, one line per node, as tests and `explain` print it."""
    lines = (f"{n.name} = {_target(n)}{_arguments(n)}" for n in graph.nodes if n.op == "call_function")
    results = ", ".join(str(a) for a in _flat(outputs(graph).args[0]))
    return "\n".join([*lines, f"return {results}"])


def _target(node: fx.Node) -> str:
    return re.sub(r"^<built-in function (\w+)>$", r"\1", str(node.target)).removesuffix(".default")


def _arguments(node: fx.Node) -> str:
    named = (f"{k}={v}" for k, v in node.kwargs.items())
    return f"({', '.join([*(str(a) for a in node.args), *named])})"


def _flat(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else (value,)
