"""The inner compiler "inductor", which partitions and compiles graphs with the passes' operations in them.

It puts new values into memory whose values are no longer needed, but never into memory that an operation
declares to alias its arguments, as `wait_allgather` does: the memory of a gathered value is the engine's,
even after its release.

What it cannot compile runs one operation at a time. So that this is known before anything has run, a backward
is compiled together with its forward: of one graph, both are generated or neither is, which random numbers
that the backward draws again need.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from zero.compiled.graphs import outputs
from zero.compiled.replays import Replays

Compiled = Callable[..., Any]
Telling = Callable[[str, str], AbstractContextManager[None]]
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
Inference = Callable[[fx.GraphModule], fx.GraphModule]
AT_ONCE = {"force_non_lazy_backward_lowering": True}


class CodeGenerator:
    """Inductor for one engine's graphs.

    telling: see `Communicator.telling`. failed: why it could not compile a graph; "" if it could all.
    """

    def __init__(self, telling: Telling) -> None:
        self.failed = ""
        self._telling = telling

    def generate(
        self, module: fx.GraphModule, compile: Callable[[], Compiled], otherwise: Callable[..., Compiled]
    ) -> Compiled:
        """Compile dynamo's graph, `module`. otherwise: makes something of the graph as it was if that fails;
        what it raises was no fault of inductor's."""
        untouched = copy.deepcopy(module)
        try:
            return compile()
        except Exception as error:
            why = str(error).strip().split("\n")[0]
            with nullcontext() if self.failed else self._telling("inductor", _ONE_BY_ONE + why):
                compiled = otherwise(untouched)
            self.failed = why
            return compiled

    def compile_unit(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """The dynamo backend for units that hooks gather."""

        def compile() -> Compiled:
            with functorch_config.patch(AT_ONCE):
                return cast(Compiled, compile_fx(module, inputs))

        return self.generate(module, compile, lambda untouched: untouched.forward)


_ONE_BY_ONE = (
    "inductor could not compile a graph of the model, whose operations run one by one instead, as with "
    'zero.Compile(inner="aot_eager"): '
)


def compile_graph(
    module: fx.GraphModule,
    replays: Replays | None,
    inputs: Sequence[Any],
    partition: Partition,
    inference: Inference,
) -> Compiled:
    """Compile dynamo's graph. replays: where segments are captured, each of which is compiled by itself;
    else None. partition: takes the place of inductor's own. inference: runs before its compiler, on graphs
    without a backward."""

    def inner(graph: fx.GraphModule, fakes: Sequence[Any], **options: Any) -> Any:
        if options.get("is_inference"):
            graph = inference(graph)
        if replays is not None:
            _keep_strides(graph, TracingContext.get().output_strides)
            return replays.make(graph, _generate_segment)
        return compile_fx_inner(graph, fakes, **options)

    # The passes have put nodes into an order that takes little memory and is the same on all ranks. Another
    # one, found by the sizes of a rank's own batch, might not be.
    patches = {"custom_partitioner_fn": _Partitioner(partition), "reorder_for_peak_memory": False}
    settings = {**AT_ONCE, "enable_autograd_cache": False}  # a cache would skip the passes and their reports
    with functorch_config.patch(settings):
        return cast(Compiled, compile_fx(module, inputs, inner, patches))


def _generate_segment(segment: fx.GraphModule, fakes: Sequence[Any]) -> Callable[[Sequence[Any]], Any]:
    """Compile a segment of a graph, whose results have the strides that the next one was traced with."""
    output = outputs(segment.graph)
    output.meta["user_visible_output_idxs"] = range(len(output.args[0]))  # type: ignore[arg-type]
    # The passes are done, and inductor's cache of compiled graphs cannot tell partitioners apart.
    with inductor_config.patch(custom_partitioner_fn=None), TracingContext.report_output_strides():
        compiled = compile_fx_inner(segment, fakes)
    return lambda inputs: compiled(list(inputs))


def _keep_strides(graph: fx.GraphModule, reported: list[Any] | None) -> None:
    """Report the strides of a graph's outputs: those that it was traced with."""
    if reported is not None:
        values = (n.meta.get("val") if isinstance(n, fx.Node) else n for n in outputs(graph.graph).args[0])  # type: ignore[union-attr]
        reported += [v.stride() if isinstance(v, Tensor) else None for v in values]


class _Partitioner(CustomPartitionerFn):  # type: ignore[misc,unused-ignore]
    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
        return self._partition(gm, joint_inputs, **options)

    def uuid(self) -> bytes:
        """For the key of inductor's cache: what the passes did shows in the graph, which is part of the key
        anyway."""
        return b"zero"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """That key holds inductor's settings too, pickled: this one as a word, since it is of one engine."""
        return str, ("zero",)
