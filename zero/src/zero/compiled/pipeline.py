"""The passes in their order, and what they did."""

from __future__ import annotations

from collections.abc import Sequence

from zero.compiled.explain import GraphReport, report
from zero.compiled.facts import ParameterFacts
from zero.compiled.graphs import ShardedGraph
from zero.compiled.passes.end_backward import end_backward
from zero.compiled.passes.fuse_casts import fuse_casts
from zero.compiled.passes.insert_gathers import insert_gathers
from zero.compiled.passes.list_schedule import list_schedule
from zero.compiled.passes.offload_activations import offload_activations
from zero.compiled.passes.prefetch import prefetch
from zero.compiled.passes.reduce_gradients import reduce_gradients
from zero.compiled.passes.reload_parameters import reload_parameters
from zero.compiled.passes.retain import retain
from zero.compiled.passes.save_sharded import save_sharded
from zero.compiled.passes.schedule_optimizer import schedule_optimizer, send_optimizer
from zero.compiled.passes.sink_weight_ops import sink_weight_ops
from zero.compiled.passes.tie_releases import tie_releases
from zero.config.compilation import Compile


def for_inference(graph: ShardedGraph, settings: Compile) -> GraphReport:
    """Run the passes on a forward that no backward follows."""
    counts = _gathers(graph, settings)
    counts |= {"list_schedule": list_schedule(graph, inputs_go=False)}
    counts |= _begin_ahead(graph, settings)
    if _streams_optimizer(graph):
        send_optimizer(graph)
    counts |= _finish(graph, settings)
    return report(graph, "inference", counts)


def for_training(
    forward: ShardedGraph,
    backward: ShardedGraph,
    inputs: Sequence[ParameterFacts | None],
    kept: int,
    settings: Compile,
    activations: float,
) -> tuple[GraphReport, GraphReport]:
    """Run the passes on a forward and its backward, as they were partitioned.

    inputs: of the forward, by place; None for those that are not parameters. kept: how many of the forward's
    outputs are the model's own. activations: the part of what is saved that waits on the host.
    """
    saved = save_sharded(forward, backward, kept)
    ahead = {"save_sharded": saved} | _gathers(forward, settings)
    back = _gathers(backward, settings)
    back |= {"reduce_gradients": reduce_gradients(backward, inputs)}
    ahead |= {"list_schedule": list_schedule(forward, inputs_go=False)}
    back |= {"list_schedule": list_schedule(backward, inputs_go=True), "end_backward": end_backward(backward)}
    ahead |= {"retain": retain(forward, backward)}
    if activations:
        ahead |= {"offload_activations": offload_activations(forward, backward, kept, activations)}
    ahead |= _begin_ahead(forward, settings)
    back |= _begin_ahead(backward, settings)
    if _streams_optimizer(forward):
        back |= {"schedule_optimizer": schedule_optimizer(forward, backward)}
    ahead |= _finish(forward, settings)
    back |= _finish(backward, settings)
    return report(forward, "forward", ahead), report(backward, "backward", back)


def _gathers(graph: ShardedGraph, settings: Compile) -> dict[str, int]:
    counts = {"sink_weight_ops": sink_weight_ops(graph), "insert_gathers": insert_gathers(graph)}
    if settings.fuse_casts:
        counts |= {"fuse_casts": fuse_casts(graph)}
    return counts


def _streams_optimizer(graph: ShardedGraph) -> bool:
    return any(unit.streamed for unit in graph.facts.units)


def _begin_ahead(graph: ShardedGraph, settings: Compile) -> dict[str, int]:
    counts = {"prefetch": prefetch(graph, settings.prefetch_budget)}
    if any(unit.away for unit in graph.facts.units):
        counts |= {"reload_parameters": reload_parameters(graph)}
    return counts


def _finish(graph: ShardedGraph, settings: Compile) -> dict[str, int]:
    counts: dict[str, int] = {}
    if settings.inner == "inductor" and not settings.graphs:  # else no release is in generated code
        counts |= {"tie_releases": tie_releases(graph)}
    graph.finish()
    return counts
