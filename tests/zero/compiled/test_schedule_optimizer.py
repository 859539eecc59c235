"""The pass that brings optimizer state in a backward and sends it in a forward: the text before and after."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.zero.helpers.graphs import FACTS, graph_of, shown
from zero.compiled.facts import UnitFacts
from zero.compiled.graphs import ShardedGraph
from zero.compiled.liveness import peak_of
from zero.compiled.ops import OFFLOAD_OPTIMIZER, RELOAD_OPTIMIZER, WAIT_OFFLOAD_OPTIMIZER
from zero.compiled.passes.schedule_optimizer import schedule_optimizer, send_optimizer


def ahead(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values of 64 bytes, and one of 256 at the end."""
    first = x * a
    second = first * b
    return torch.cat([second] * 4).relu(), first, second


def back(first: Tensor, second: Tensor, a: Tensor, tangent: Tensor) -> Tensor:
    """What is saved goes after its use."""
    wide = torch.cat([tangent] * 4) * 2
    gradient = wide[:4] * second
    gradient = gradient * first
    return gradient * a


def pair(*visiting: int, scratch: int = 0, records: int = 1) -> tuple[ShardedGraph, ShardedGraph]:
    """streamed: bytes of each unit's state, in so many records; the first two are those of a and b."""
    graphs = graph_of(ahead, "x", "a", "b"), graph_of(back, "first", "second", "a", "tangent")
    units = tuple(UnitFacts(str(n), True, {}, streamed=nbytes) for n, nbytes in enumerate(visiting))
    passing = 3 * max(visiting) // records
    for graph in graphs:
        graph.facts = replace(FACTS, units=units, scratch=scratch, passing=passing)
    return graphs


def peaks(forward: ShardedGraph, backward: ShardedGraph) -> tuple[int, int]:
    return peak_of(forward, inputs_go=False), peak_of(backward, inputs_go=True)


def test_state_comes_as_it_fits_and_leaves_before_it_is_missed() -> None:
    forward, backward = pair(256, 64)
    assert peaks(forward, backward) == (704, 640)
    assert schedule_optimizer(forward, backward) == 2
    assert shown(forward).splitlines() == [
        "offload_optimizer = zero.offload_optimizer([in_a, in_b], 7, [0, 1])",
        "mul = aten.mul.Tensor(in_x, in_a)",
        "mul_1 = aten.mul.Tensor(mul, in_b)",
        "wait_offload_optimizer = zero.wait_offload_optimizer([in_a, in_b], 7, [0])",
        "cat = aten.cat([mul_1, mul_1, mul_1, mul_1])",  # 448 bytes, and 64
        "wait_offload_optimizer_1 = zero.wait_offload_optimizer([in_a, in_b], 7, [1])",
        "relu = aten.relu(cat)",  # 704
        "return relu, mul, mul_1",
    ]
    assert shown(backward).splitlines() == [
        "cat = aten.cat([in_tangent, in_tangent, in_tangent, in_tangent])",
        "mul = aten.mul.Tensor(cat, 2)",  # 640
        "reload_optimizer = zero.reload_optimizer([in_a], 7, [0])",
        "slice_1 = aten.slice.Tensor(mul, 0, 0, 4)",
        "mul_1 = aten.mul.Tensor(slice_1, in_second)",  # 448, and 256
        "reload_optimizer_1 = zero.reload_optimizer([in_a], 7, [1])",
        "mul_2 = aten.mul.Tensor(mul_1, in_first)",  # 192, and 320
        "mul_3 = aten.mul.Tensor(mul_2, in_a)",
        "return mul_3",
    ]
    assert peaks(forward, backward) == (704, 704)


@pytest.mark.parametrize(
    ("visiting", "scratch", "records", "coming"),
    [
        ((288, 288), 0, 1, [0, 1]),  # 576 bytes are free at the end
        ((288, 289), 0, 1, []),  # what passes in the step takes as much
        ((288, 288), 1, 1, []),
        ((100, 0, 100, 100, 100, 100), 76, 1, [0, 2, 3, 4, 5]),
        ((100, 0, 100, 100, 100, 100), 77, 1, [0]),  # and three that pass
        ((50, 150, 50, 50, 50, 150, 100), 0, 1, [0, 2]),  # of 126 bytes
        ((50, 6000, 50, 50), 0, 1, []),
        ((50, 6000, 50, 50), 0, 60, [0, 2, 3]),  # three records of a large unit leave 276 bytes
    ],
)
def test_a_step_has_room_for_what_did_not_fit(
    visiting: tuple[int, ...], scratch: int, records: int, coming: list[int]
) -> None:
    forward, backward = pair(*visiting, scratch=scratch, records=records)
    assert schedule_optimizer(forward, backward) == len(coming)
    brought = [unit for n in backward.graph.nodes if n.target is RELOAD_OPTIMIZER for unit in n.args[2]]
    assert brought == coming
    others = [unit for unit, nbytes in enumerate(visiting) if nbytes and unit not in coming]
    first = next(node for node in forward.graph.nodes if node.op == "call_function")
    if others:  # nobody may be left from a backward of other shapes
        assert first.target is WAIT_OFFLOAD_OPTIMIZER
        assert first.args[2] == others
    sent = [unit for n in forward.graph.nodes if n.target is OFFLOAD_OPTIMIZER for unit in n.args[2]]
    gone = [unit for n in forward.graph.nodes if n.target is WAIT_OFFLOAD_OPTIMIZER for unit in n.args[2]]
    assert sent == coming
    assert gone == others + coming
    assert max(peaks(forward, backward)) == 704


def test_before_inference_all_goes() -> None:
    forward, _ = pair(256, 64)
    send_optimizer(forward)
    assert shown(forward).splitlines()[:2] == [
        "wait_offload_optimizer = zero.wait_offload_optimizer([in_a, in_b], 7, [0, 1])",
        "mul = aten.mul.Tensor(in_x, in_a)",
    ]
    assert peak_of(forward, inputs_go=False) == 704


def plus(x: Tensor, a: Tensor) -> Tensor:
    return x + 1


def through(tangent: Tensor) -> Tensor:
    return tangent


def test_graphs_with_nothing_to_do() -> None:
    units = (UnitFacts("0", True, {}, streamed=64),)
    graphs = graph_of(plus, "x", "a"), graph_of(through, "tangent")
    for graph in graphs:
        graph.facts = replace(FACTS, units=units)
    forward, backward = graphs
    assert schedule_optimizer(forward, backward) == 0
    assert shown(forward).startswith("wait_offload_optimizer")
    send_optimizer(backward)
    assert shown(backward) == "return in_tangent"
