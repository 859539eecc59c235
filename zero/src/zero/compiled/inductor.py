"""The inner compiler "inductor", which partitions and compiles graphs with the passes' operations in them.

It puts new values into memory whose values are no longer needed, but never into memory that an operation
declares to alias its arguments, as `wait_allgather` does: the memory of a gathered value is the engine's,
even after its release.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def compile_graph(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Partition,
    inference: Callable[[fx.GraphModule], fx.GraphModule],
) -> Callable[..., Any]:
    """Compile dynamo's graph. partition: takes the place of inductor's own. inference: runs before its
    compiler, on graphs without a backward."""

    def inner(graph: fx.GraphModule, fakes: Sequence[Any], **options: Any) -> Any:
        if options.get("is_inference"):
            graph = inference(graph)
        return compile_fx_inner(graph, fakes, **options)

    # The passes have put nodes into an order that takes little memory and is the same on all ranks. Another
    # one, found by the sizes of a rank's own batch, might not be.
    patches = {"custom_partitioner_fn": _Partitioner(partition), "reorder_for_peak_memory": False}
    with functorch_config.patch(enable_autograd_cache=False):  # it would skip the passes and their reports
        compiled: Any = compile_fx(module, inputs, inner, patches)
    assert callable(compiled)
    return compiled  # type: ignore[no-any-return]


class _Partitioner(CustomPartitionerFn):  # type: ignore[misc,unused-ignore]
    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
        return self._partition(gm, joint_inputs, **options)

    def uuid(self) -> bytes:
        """For the key of inductor's cache: what the passes did shows in the graph, which is part of the key
        anyway."""
        return b"zero"
