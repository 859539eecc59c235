"""The backend that dynamo calls: partition, passes, then the inner compiler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import _is_tangent, min_cut_rematerialization_partition

from zero.compiled import inductor, pipeline
from zero.compiled.explain import GraphReport
from zero.compiled.facts import Facts, ParameterFacts
from zero.compiled.graphs import ShardedGraph, outputs
from zero.compiled.local_inputs import take_locals
from zero.compiled.replays import Ends, Replays
from zero.config.compilation import Compile

Graphs = tuple[fx.GraphModule, fx.GraphModule]
Parameters = Sequence[ParameterFacts | None]
"""The parameters among a graph's inputs, by place; None for other inputs."""


class NotOneGraph(Exception):
    """Raised for a model that cannot run as one graph, although it traces as one."""


@dataclass(eq=False, repr=False)
class ShardingBackend:
    """A dynamo backend for graphs some of whose inputs are the engine's parameters.

    parameters: by number. activations: the part, of 1, of those saved for backward that waits on the host.
    replays: where segments of graphs are captured and replayed; else None. telling: see
    `Communicator.telling`. reports: of all graphs so far. generator: of code, where the settings want it.
    Keeps no tensor, because dynamo keeps backends.
    """

    facts: Facts
    parameters: InitVar[Sequence[nn.Parameter]]
    settings: Compile
    activations: float
    replays: Replays | None
    telling: InitVar[inductor.Telling]

    def __post_init__(self, parameters: Sequence[nn.Parameter], telling: inductor.Telling) -> None:
        self.reports: list[GraphReport] = []
        self.generator = inductor.CodeGenerator(telling)
        self._numbers = {id(p): n for n, p in enumerate(parameters)}

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> inductor.Compiled:
        parameters = self._locate(inputs)
        self._check_results(module, parameters)
        inputs, of_locals = take_locals(module, inputs, parameters)
        passes = inputs, partial(self._partition, parameters), partial(self._inference, parameters)
        reported = len(self.reports)
        if self.settings.inner == "aot_eager":
            return of_locals(_one_by_one(module, self.replays, *passes))

        def otherwise(untouched: fx.GraphModule) -> inductor.Compiled:
            del self.reports[reported:]
            return _one_by_one(untouched, self.replays, *passes)

        compile = partial(inductor.compile_graph, module, self.replays, *passes)
        return of_locals(self.generator.generate(module, compile, otherwise))

    def _partition(
        self, parameters: Parameters, joint: fx.GraphModule, fakes: Sequence[Any], **options: Any
    ) -> Graphs:
        """Cut a joint graph into forward and backward, and run the passes on both."""
        forward, backward = min_cut_rematerialization_partition(joint, fakes, **options)
        names = _by_name(forward, parameters)
        gradients = outputs(backward.graph).args[0]  # of the inputs, without states of generators after them
        placeholders = forward.graph.find_nodes(op="placeholder")[: len(gradients)]  # type: ignore[arg-type]
        inputs = [names.get(node.name) for node in placeholders]
        graphs = (ShardedGraph(forward, self.facts, names), ShardedGraph(backward, self.facts, names))
        kept = options["num_fwd_outputs"]
        self.reports += pipeline.for_training(*graphs, inputs, kept, self.settings, self.activations)
        _ends(forward, names, kept).note(forward)
        tangents = [node.name for node in backward.graph.find_nodes(op="placeholder") if _is_tangent(node)]
        Ends(frozenset(tangents)).note(backward)
        return forward, backward

    def _inference(self, parameters: Parameters, module: fx.GraphModule) -> fx.GraphModule:
        """Run the passes on a graph without a backward."""
        names = _by_name(module, parameters)
        self.reports.append(pipeline.for_inference(ShardedGraph(module, self.facts, names), self.settings))
        _ends(module, names, None).note(module)
        return module

    def _check_results(self, module: fx.GraphModule, inputs: Parameters) -> None:
        """Raise NotOneGraph if a result is a view of a parameter: its bytes would go before anybody reads
        it."""
        placeholders = module.graph.find_nodes(op="placeholder")
        sharded = {
            _memory_of(node)
            for node, parameter in zip(placeholders, inputs, strict=True)
            if parameter is not None and not self.facts.units[parameter.unit].resident
        }
        if not sharded.isdisjoint(map(_memory_of, outputs(module.graph).all_input_nodes)):
            raise NotOneGraph("it returns a view of one of its parameters")

    def _locate(self, inputs: Sequence[Any]) -> list[ParameterFacts | None]:
        numbers = (self._numbers.get(id(i)) for i in inputs)
        return [None if number is None else self.facts.parameters[number] for number in numbers]


def _memory_of(node: fx.Node) -> object:
    """What identifies the memory of a value in dynamo's graph."""
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else node


def _by_name(module: fx.GraphModule, parameters: Parameters) -> dict[str, ParameterFacts]:
    """Parameters by the name of their placeholder; AOTAutograd keeps the inputs' order."""
    placeholders = module.graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, parameters, strict=False)  # after the inputs: states of generators
    return {node.name: parameter for node, parameter in pairs if parameter is not None}


def _ends(module: fx.GraphModule, parameters: Collection[str], results: int | None) -> Ends:
    names = (node.name for node in module.graph.find_nodes(op="placeholder"))
    return Ends(frozenset(name for name in names if name not in parameters), results)


def _one_by_one(
    graph: fx.GraphModule,
    replays: Replays | None,
    inputs: Sequence[Any],
    partition: inductor.Partition,
    inference: inductor.Inference,
) -> inductor.Compiled:
    """What runs the operations of the graph after the passes, without generated code."""

    def compile(module: fx.GraphModule, fakes: Sequence[Any]) -> Any:
        return boxed_nop(module, fakes) if replays is None else replays.make(module, _as_it_is)  # type: ignore[arg-type]

    compiler = aot_autograd(
        fw_compiler=compile,
        bw_compiler=compile,
        inference_compiler=lambda module, fakes: compile(inference(module), fakes),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    compiled: inductor.Compiled = compiler(graph, inputs)
    return compiled


def _as_it_is(segment: fx.GraphModule, _: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
    return lambda inputs: segment.forward(*inputs)
