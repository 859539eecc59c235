"""Each pass by itself, on a graph made for it: the text before and after."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._prims import rng_prims
from torch.fx.experimental.proxy_tensor import make_fx

import zero
from tests.zero.helpers.graphs import FACTS, HANDLE, graph_of, named, shown
from zero.compiled.explain import predicted_peak
from zero.compiled.facts import Facts, UnitFacts
from zero.compiled.graphs import ShardedGraph, outputs
from zero.compiled.liveness import peak_of
from zero.compiled.passes.fuse_casts import fuse_casts
from zero.compiled.passes.insert_gathers import insert_gathers
from zero.compiled.passes.list_schedule import list_schedule
from zero.compiled.passes.offload_activations import offload_activations
from zero.compiled.passes.prefetch import prefetch
from zero.compiled.passes.reduce_gradients import reduce_gradients
from zero.compiled.passes.reload_parameters import reload_parameters
from zero.compiled.passes.retain import retain
from zero.compiled.passes.save_sharded import save_sharded
from zero.compiled.passes.sink_weight_ops import sink_weight_ops
from zero.compiled.passes.tie_releases import tie_releases

BF16, FP32 = torch.bfloat16, torch.float32
A, B, C = FACTS.parameters


def chain(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a, then b through a view, then the resident c."""
    return (x @ a).relu() @ b.t() + c


def test_insert_gathers() -> None:
    graph = graph_of(chain, "x", "a", "b", "c")
    assert shown(graph).splitlines() == [
        "mm = aten.mm(in_x, in_a)",
        "relu = aten.relu(mm)",
        "t = aten.t(in_b)",
        "mm_1 = aten.mm(relu, t)",
        "add = aten.add.Tensor(mm_1, in_c)",
        "return add",
    ]
    assert insert_gathers(graph) == 2
    assert shown(graph).splitlines() == [
        "allgather_param = zero.allgather_param([in_a], 7, 0, torch.float32)",
        "wait_allgather = zero.wait_allgather([in_a], 7, [0], torch.float32)",
        "getitem = getitem(wait_allgather, 0)",
        "mm = aten.mm(in_x, getitem)",
        "release_param = zero.release_param([getitem], 7, 0)",
        "relu = aten.relu(mm)",
        "allgather_param_1 = zero.allgather_param([in_b], 7, 1, torch.float32)",
        "wait_allgather_1 = zero.wait_allgather([in_b], 7, [1], torch.float32)",
        "getitem_1 = getitem(wait_allgather_1, 0)",
        "t = aten.t(getitem_1)",
        "mm_1 = aten.mm(relu, t)",  # what the view is read by is before the release
        "release_param_1 = zero.release_param([getitem_1], 7, 1)",
        "add = aten.add.Tensor(mm_1, in_c)",
        "return add",
    ]
    assert predicted_peak(graph) == 64


def test_insert_gathers_refuses_writes() -> None:
    graph = graph_of(lambda x, a: a.view(16).mul_(2).sum() + x, "x", "a")
    with pytest.raises(zero.ModelError, match="'a'"):
        insert_gathers(graph)


def test_derive_late() -> None:
    def eager_casts(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        first, second = a.to(BF16).t(), b.to(BF16)
        return (x.to(BF16) @ first).relu() @ second

    peaks, lines = [], []
    for late in (False, True):
        graph = graph_of(eager_casts, "x", "a", "b")
        moved = sink_weight_ops(graph) if late else 0
        lines = shown(graph).splitlines()
        insert_gathers(graph)
        fuse_casts(graph)
        peaks.append(predicted_peak(graph))
    assert moved == 3
    assert lines == [
        "_to_copy_2 = aten._to_copy(in_x, dtype=torch.bfloat16)",
        "_to_copy = aten._to_copy(in_a, dtype=torch.bfloat16)",
        "t = aten.t(_to_copy)",
        "mm = aten.mm(_to_copy_2, t)",
        "relu = aten.relu(mm)",
        "_to_copy_1 = aten._to_copy(in_b, dtype=torch.bfloat16)",
        "mm_1 = aten.mm(relu, _to_copy_1)",
        "return mm_1",
    ]
    assert peaks == [64, 32]  # both in bf16 at one time, and one after the other


def cast(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a is only cast, once behind a view; b is cast and read as it is."""
    return (x.to(BF16) @ a.t().to(BF16)).float() + b + b.to(BF16)


def test_fuse_casts() -> None:
    graph = graph_of(cast, "x", "a", "b")
    insert_gathers(graph)
    assert fuse_casts(graph) == 1
    assert shown(graph).splitlines() == [
        "_to_copy = aten._to_copy(in_x, dtype=torch.bfloat16)",
        "allgather_param = zero.allgather_param([in_a], 7, 0, torch.bfloat16)",
        "wait_allgather = zero.wait_allgather([in_a], 7, [0], torch.bfloat16)",
        "getitem = getitem(wait_allgather, 0)",
        "t = aten.t(getitem)",
        "mm = aten.mm(_to_copy, t)",
        "release_param = zero.release_param([getitem], 7, 0)",  # behind who read the cast
        "_to_copy_2 = aten._to_copy(mm, dtype=torch.float32)",
        "allgather_param_1 = zero.allgather_param([in_b], 7, 1, torch.float32)",
        "wait_allgather_1 = zero.wait_allgather([in_b], 7, [1], torch.float32)",
        "getitem_1 = getitem(wait_allgather_1, 0)",
        "add = aten.add.Tensor(_to_copy_2, getitem_1)",
        "_to_copy_3 = aten._to_copy(getitem_1, dtype=torch.bfloat16)",
        "release_param_1 = zero.release_param([getitem_1], 7, 1)",
        "add_1 = aten.add.Tensor(add, _to_copy_3)",
        "return add_1",
    ]
    nodes = {n.name: n for n in graph.graph.nodes}
    assert (graph.nbytes(nodes["wait_allgather"]), graph.nbytes(nodes["wait_allgather_1"])) == (32, 64)


def test_fuse_casts_takes_the_widest() -> None:
    """bf16 and float16 have only fp32 in common: nothing is gained, and nothing is lost."""
    graph = graph_of(lambda x, a: x + a.to(BF16) + a.to(torch.float16), "x", "a")
    insert_gathers(graph)
    assert fuse_casts(graph) == 0


def crossed(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """As written, a and b are whole at one time."""
    first, second = x @ a, x @ b
    return (first @ a).sum() + (second @ b).sum()


def test_list_schedule() -> None:
    graph = graph_of(crossed, "x", "a", "b")
    insert_gathers(graph)
    before = peak_of(graph, inputs_go=False)
    written = [line.split()[0] for line in shown(graph).splitlines()]
    assert written.index("allgather_param_1") < written.index("release_param")
    assert before == 6 * 64  # a, b, x, and three products: every matrix is 64 bytes
    assert list_schedule(graph, inputs_go=False) == 2 * 64 - 4
    assert peak_of(graph, inputs_go=False) == 4 * 64 + 4  # a or b, x, two products, and a sum
    assert shown(graph).splitlines() == [
        "allgather_param = zero.allgather_param([in_a], 7, 0, torch.float32)",
        "wait_allgather = zero.wait_allgather([in_a], 7, [0], torch.float32)",
        "getitem = getitem(wait_allgather, 0)",
        "mm = aten.mm(in_x, getitem)",
        "mm_2 = aten.mm(mm, getitem)",
        "release_param = zero.release_param([getitem], 7, 0)",
        "sum_1 = aten.sum(mm_2)",
        "allgather_param_1 = zero.allgather_param([in_b], 7, 1, torch.float32)",
        "wait_allgather_1 = zero.wait_allgather([in_b], 7, [1], torch.float32)",
        "getitem_1 = getitem(wait_allgather_1, 0)",
        "mm_1 = aten.mm(in_x, getitem_1)",
        "mm_3 = aten.mm(mm_1, getitem_1)",
        "release_param_1 = zero.release_param([getitem_1], 7, 1)",
        "sum_2 = aten.sum(mm_3)",
        "add = aten.add.Tensor(sum_1, sum_2)",
        "return add",
    ]
    assert list_schedule(graph, inputs_go=False) == 0  # nothing is better than that


def test_list_schedule_keeps_what_is_good() -> None:
    graph = graph_of(chain, "x", "a", "b", "c")
    insert_gathers(graph)
    before = shown(graph)
    assert list_schedule(graph, inputs_go=False) == 0
    assert shown(graph) == before


def test_list_schedule_keeps_effects_in_order() -> None:
    """Copies of x are made early and used late; random numbers and writes are between."""

    def noisy(x: Tensor, seen: Tensor) -> Tensor:
        early = [x + n for n in range(4)]
        total = torch.zeros(4, 4)
        for copied in early:
            total = total + copied * torch.rand_like(copied)
            seen.add_(total)
        return total + seen

    graph = graph_of(noisy, "x", "seen")

    def effects() -> list[str]:
        return [
            line.split()[0]
            for line in shown(graph).splitlines()
            if "rand_like" in line or "aten.add_" in line
        ]

    before, values = effects(), graph_values(graph)
    assert list_schedule(graph, inputs_go=False) > 0
    assert effects() == before
    assert torch.equal(graph_values(graph), values)


def graph_values(graph: ShardedGraph) -> Tensor:
    graph.finish()
    torch.manual_seed(0)
    result: Tensor = graph.module(torch.rand(4, 4) / 8, torch.zeros(4, 4))
    return result


def test_list_schedule_counts_gradients() -> None:
    """A backward's saved values go after their use, a unit's gradients when the last one is there."""

    def backward(tangent: Tensor, x: Tensor, y: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return tangent @ a.t(), x @ tangent, y @ tangent, x

    graph = graph_of(backward, "tangent", "x", "y", "a")
    insert_gathers(graph)
    reduce_gradients(graph, (None, A, B, None))
    assert peak_of(graph, inputs_go=True) == 64 * (3 + 1 + 1 + 1)


def test_prefetch_keeps_to_its_budget() -> None:
    def three(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (x @ a).relu() @ b

    for budget, ahead in ((63, 0), (64, 1), (None, 1)):
        graph = graph_of(three, "x", "a", "b")
        insert_gathers(graph)
        assert prefetch(graph, budget) == ahead
        lines = shown(graph).splitlines()
        begun = "prefetch_params_fused = zero.prefetch_params_fused([in_b], 7, [1], [torch.float32])"
        assert lines[3:4] == ([begun] if ahead else ["mm = aten.mm(in_x, getitem)"])
        assert predicted_peak(graph) == 64 * (1 + ahead)


def test_prefetches_keep_the_order_of_gathers() -> None:
    units = tuple(UnitFacts(name, False, {FP32: 16}) for name in "abc")
    graph = graph_of(lambda x, a, b, c: x @ a @ b @ c, "x", "a", "b", "c")
    graph.facts = Facts(HANDLE, units, FACTS.parameters)
    insert_gathers(graph)
    assert prefetch(graph, 128) == 2
    (begun,) = (line for line in shown(graph).splitlines() if "prefetch" in line)
    assert begun.endswith("([in_b, in_c], 7, [1, 2], [torch.float32, torch.float32])")
    assert list(graph.begins()) == [0]


@pytest.mark.parametrize("budget", [0, 64])
def test_reload_parameters(budget: int) -> None:
    """Two gathers ahead, wherever those begin; b is on the device all the time."""
    graph = graph_of(lambda x, a, b, c: x @ a @ b @ c, "x", "a", "b", "c")
    elements = {FP32: 16}
    units = tuple(UnitFacts(name, False, elements, away=name != "b") for name in "abc")
    graph.facts = Facts(HANDLE, units, FACTS.parameters)
    insert_gathers(graph)
    prefetch(graph, budget)
    assert reload_parameters(graph) == 2
    moves = [line.partition(" = ")[0] for line in shown(graph).splitlines() if "param" in line]
    assert [m for m in moves if "release" not in m] == {
        0: [
            "reload_parameter",
            "reload_parameter_1",
            "allgather_param",
            "offload_parameter",
            "allgather_param_1",
            "allgather_param_2",
            "offload_parameter_1",
        ],
        64: [
            "reload_parameter",
            "reload_parameter_1",
            "allgather_param",
            "offload_parameter",
            "prefetch_params_fused",
            "prefetch_params_fused_1",
            "offload_parameter_1",
        ],
    }[budget]


def test_tie_releases() -> None:
    graph = graph_of(chain, "x", "a", "b", "c")
    insert_gathers(graph)
    assert tie_releases(graph) == 2
    released = [line for line in shown(graph).splitlines() if "release" in line]
    assert released == [
        "release_param = zero.release_param([getitem], 7, 0, False, [mm])",
        "release_param_1 = zero.release_param([getitem_1], 7, 1, False, [mm_1])",
    ]


def test_releases_are_not_tied_to_states_of_generators() -> None:
    """A random operation that the backward repeats hands out the state it found, which nothing computes."""
    graph = graph_of(lambda x, a: torch.rand_like(x @ a), "x", "a")
    (drawn,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.rand_like.default)
    with graph.graph.inserting_before(drawn):
        saved = graph.graph.call_function(rng_prims.run_and_save_rng_state, (drawn.target, *drawn.args))
        state, value = (graph.graph.call_function(operator.getitem, (saved, index)) for index in range(2))
    state.meta["val"], value.meta["val"] = torch.get_rng_state(), drawn.meta["val"]
    outputs(graph.graph).args = ((value, state),)
    graph.graph.erase_node(drawn)
    insert_gathers(graph)
    value.append(*graph.releases().values())
    assert tie_releases(graph) == 1
    (release,) = graph.releases().values()
    assert release.args[4] == [value]


def test_reduce_gradients() -> None:
    def backward(tangent: Tensor, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x @ tangent, tangent @ a.t(), (tangent.to(BF16) @ x.to(BF16)).float()

    graph = graph_of(backward, "tangent", "x", "a")
    assert reduce_gradients(graph, (A, None, B)) == 2
    assert shown(graph).splitlines() == [
        "mm = aten.mm(in_x, in_tangent)",
        "reduce_grad = zero.reduce_grad(mm, 7, 0, True)",
        "t = aten.t(in_a)",
        "mm_1 = aten.mm(in_tangent, t)",
        "_to_copy = aten._to_copy(in_tangent, dtype=torch.bfloat16)",
        "_to_copy_1 = aten._to_copy(in_x, dtype=torch.bfloat16)",
        "mm_2 = aten.mm(_to_copy, _to_copy_1)",
        "reduce_grad_1 = zero.reduce_grad(mm_2, 7, 1, True)",  # as it was computed
        "return None, mm_1, None",
    ]
    graph = graph_of(backward, "tangent", "x", "a")
    assert reduce_gradients(graph, (A, None, C)) == 2
    assert "reduce_grad_1 = zero.reduce_grad(_to_copy_2, 7, 2, True)" in shown(graph)  # resident: in fp32
    with pytest.raises(RuntimeError, match="3 outputs for 2 inputs"):
        reduce_gradients(graph, (A, None))


def test_one_gradient_of_several_parameters_ends_the_unit_once() -> None:
    def backward(tangent: Tensor) -> tuple[Tensor, Tensor]:
        summed = tangent.sum(0)
        return summed, summed

    graph = graph_of(backward, "tangent")
    assert reduce_gradients(graph, (A, dataclasses.replace(B, unit=0))) == 2
    assert shown(graph).splitlines()[1:3] == [
        "reduce_grad = zero.reduce_grad(sum_1, 7, 0, False)",
        "reduce_grad_1 = zero.reduce_grad(sum_1, 7, 1, True)",
    ]


def pair() -> tuple[ShardedGraph, ShardedGraph]:
    """A forward that keeps a's transposed bf16 copy, and its backward."""

    def forward(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = a.to(BF16).t()
        return x.to(BF16) @ weight, x.to(BF16), weight.t()

    ahead = graph_of(forward, "x", "a")
    saved, weight = ahead.graph.find_nodes(op="output")[0].args[0][1:]
    back = make_fx(lambda s, w, tangent: (tangent @ w, tangent.t() @ s))(
        *(torch.ones(4, 4, dtype=BF16) for _ in range(3))
    )
    for node, name in zip(
        back.graph.find_nodes(op="placeholder"), (saved.name, weight.name, "tangent"), strict=True
    ):
        node._rename(name)
    return ahead, ShardedGraph(back, FACTS, {"in_a": A})


def test_save_sharded() -> None:
    forward, backward = pair()
    assert save_sharded(forward, backward, kept=1) == 1
    assert shown(forward).splitlines()[-1].endswith(", in_a")
    assert shown(backward).splitlines() == [
        "_to_copy = aten._to_copy(in_a, dtype=torch.bfloat16)",
        "t_2 = aten.t(_to_copy)",
        "t_3 = aten.t(t_2)",
        "mm = aten.mm(tangent, t_3)",
        "t = aten.t(tangent)",
        "mm_1 = aten.mm(t, _to_copy_2)",  # an activation stays saved
        "return mm, mm_1",
    ]


def test_offload_activations() -> None:
    forward, backward = layers()
    assert offload_activations(forward, backward, kept=1, part=1.0, least=64) == 3
    assert shown(forward).splitlines() == [
        "mm = aten.mm(in_x, in_c)",
        "relu = aten.relu(mm)",
        "offload_tensor = zero.offload_tensor(mm, 7)",
        "mm_1 = aten.mm(relu, in_c)",
        "wait_offload = zero.wait_offload(offload_tensor, mm, 7)",  # here its memory is free
        "offload_tensor_1 = zero.offload_tensor(relu, 7)",
        "relu_1 = aten.relu(mm_1)",
        "mm_2 = aten.mm(relu_1, in_c)",
        "wait_offload_1 = zero.wait_offload(offload_tensor_1, relu, 7)",
        "offload_tensor_2 = zero.offload_tensor(relu_1, 7)",
        "wait_offload_2 = zero.wait_offload(offload_tensor_2, relu_1, 7)",
        "return mm_2, offload_tensor, offload_tensor_1, offload_tensor_2, in_x",
    ]
    assert shown(backward).splitlines() == [
        "reload_tensor = zero.reload_tensor(relu_1, 7, meta)",  # two ahead
        "reload_tensor_1 = zero.reload_tensor(relu, 7, meta)",
        "wait_reload = zero.wait_reload(reload_tensor, 7)",
        "reload_tensor_2 = zero.reload_tensor(mm, 7, meta)",
        "mul = aten.mul.Tensor(in_tangent, reload_tensor)",
        "wait_reload_1 = zero.wait_reload(reload_tensor_1, 7)",
        "mul_1 = aten.mul.Tensor(mul, reload_tensor_1)",
        "wait_reload_2 = zero.wait_reload(reload_tensor_2, 7)",
        "mul_2 = aten.mul.Tensor(mul_1, reload_tensor_2)",
        "mul_3 = aten.mul.Tensor(mul_2, in_x)",  # an input is the caller's
        "return mul_3",
    ]
    assert backward.graph.find_nodes(op="placeholder")[1].meta["val"].device.type == "cpu"


@pytest.mark.parametrize(
    ("part", "least", "leaving"), [(0.7, 64, ["mm", "relu"]), (0.3, 64, []), (1.0, 65, [])]
)
def test_the_longest_lived_activations_leave_first(part: float, least: int, leaving: list[str]) -> None:
    forward, backward = layers()
    assert offload_activations(forward, backward, 1, part, least) == len(leaving)
    sent = [n.all_input_nodes[0].name for n in forward.graph.nodes if "offload_tensor" in n.name]
    assert sent == leaving


def test_activations_that_share_memory_with_results_stay() -> None:
    forward, backward = layers(lambda outputs: (outputs[0], outputs[3].view(16), *outputs[1:]))
    assert offload_activations(forward, backward, kept=2, part=1.0, least=64) == 2


def layers(
    change: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = lambda o: o,
) -> tuple[ShardedGraph, ShardedGraph]:
    """A forward that saves its inner values, and its backward, on a device that is not the host."""

    def forward(x: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        first = x @ c
        second = first.relu()
        third = (second @ c).relu()
        return change((third @ c, first, second, third, x))

    def backward(tangent: Tensor, *saved: Tensor) -> Tensor:
        first, second, third, x = saved
        return tangent * third * second * first * x

    ahead = named(make_fx(forward)(*torch.ones(2, 4, 4, device="meta")), "x", "c")
    names = [n.name for n in outputs(ahead.graph).args[0]][-4:]
    back = make_fx(backward)(*torch.ones(5, 4, 4, device="meta"))
    for node, name in zip(back.graph.find_nodes(op="placeholder"), ("in_tangent", *names), strict=True):
        node._rename(name)
    return ahead, ShardedGraph(back, FACTS, {})


def test_retain() -> None:
    forward, backward = pair()
    save_sharded(forward, backward, kept=1)
    for graph in (forward, backward):
        insert_gathers(graph)
        fuse_casts(graph)
    assert retain(forward, backward) == 1
    assert "release_param = zero.release_param([getitem], 7, 0, True)" in shown(forward).splitlines()
    later = graph_of(lambda x, b, a: x @ b @ a, "x", "b", "a")
    insert_gathers(later)
    assert retain(forward, later) == 0  # the backward begins with another unit
