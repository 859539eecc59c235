"""Generated code: the same training within rounding, and the same bytes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.lowering import clone, register_lowering
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.compiled_models import WIDTH, fresh, tokens
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import device_of
from tests.zero.helpers.own_bytes import bytes_of_its_own
from tests.zero.helpers.training import adamw, scaled_error

pytestmark = pytest.mark.slow  # compiles

STEPS = 3


def train(context: Context, compile: zero.Compile, autocast: bool) -> dict[str, Any]:
    model = fresh()  # the compiler takes two seconds for each kernel
    engine = zero.initialize(model, adamw(model), zero.Config(compile=compile, timeout=100))
    losses, nbytes = [], {}
    for step in range(STEPS):
        engine.traffic.clear()
        with torch.autocast(device_of(model).type, torch.bfloat16, enabled=autocast):
            loss = engine(tokens(step, context.rank, model))
        train_on(engine, loss)
        losses.append(loss.item())
        nbytes = dict(engine.traffic.bytes)
    if not autocast:  # outside of it, the same evaluation
        with torch.no_grad():
            losses.append(engine(tokens(9, context.rank, model)).item())
    return {
        "losses": losses,
        "bytes": nbytes,
        "mode": engine.explain().mode,
        "failed": engine.explain().not_generated,
    }


def inductor_body(context: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for autocast in (False, True):
        with bytes_of_its_own(context.accelerator):
            counters.clear()
            runs = [train(context, zero.Compile(inner=i), autocast) for i in ("aot_eager", "inductor")]
        first, second = runs
        found[f"{autocast=}"] = {
            "modes": {run["mode"] for run in runs},
            "first loss": scaled_error(second["losses"][:1], first["losses"][:1]),
            "losses": scaled_error(second["losses"], first["losses"]),
            "bytes": (first["bytes"], second["bytes"]),
            "not cached": counters["inductor"]["fxgraph_cache_bypass"],
        }
    return found


def segments_body(context: Context) -> dict[str, Any]:
    """Segments are compiled by themselves, and called."""
    accelerator = context.accelerator
    before = accelerator.capabilities
    if not before.graph_capture:
        accelerator.capabilities = replace(before, graph_capture=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*could not be captured", RuntimeWarning)
            compiled = [zero.Compile(inner="aot_eager"), zero.Compile(graphs=True)]
            runs = [train(context, compile, autocast=False) for compile in compiled]
    finally:
        accelerator.capabilities = before
    return {"losses": [run["losses"] for run in runs], "failed": runs[1]["failed"]}


@pytest.mark.usefixtures("generates_code")
def test_segments_for_device_graphs_train_as_aot_eager(cluster: Clusters, device: str) -> None:
    for found in cluster(2).run(segments_body, limit=280):
        assert found["failed"] == ""
        eager, segments = found["losses"]
        assert scaled_error(segments, eager) < (1e-5 if device == "cpu" else 1e-3), found


@pytest.mark.usefixtures("generates_code")
def test_inductor_trains_as_aot_eager(cluster: Clusters, device: str) -> None:
    """fp32: within rounding. bf16 autocast: fused kernels round less often, which training at this learning
    rate amplifies step by step. Gathers and reductions are the same. Inductor's cache knows the code."""
    for found in cluster(2).run(inductor_body, limit=280):
        for runs in found.values():
            assert runs["modes"] == {"graph"}
            assert runs["bytes"][0] == runs["bytes"][1]
            assert runs["not cached"] == 0
        exact, rounded = found.values()
        assert exact["losses"] < (1e-5 if device == "cpu" else 1e-3), exact
        assert rounded["first loss"] < 1e-3, rounded
        assert rounded["losses"] < 0.1, rounded


def kept_body(context: Context) -> list[int]:
    """Bytes gathered in a step whose last unit's gradients are there before the backward reads it."""
    found = []
    with bytes_of_its_own(context.accelerator):
        for inner in ("aot_eager", "inductor"):
            torch.manual_seed(2)
            model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
            compile = zero.Compile(inner=inner)
            config = zero.Config(compile=compile, units=(nn.Linear,), timeout=100)
            engine = zero.initialize(model, adamw(model), config)
            for _ in range(2):
                engine.traffic.clear()
                train_on(engine, engine(torch.ones(4, 32, device=device_of(model))).square().mean())
            found.append(engine.traffic.bytes["all_gather"])
    return found


@pytest.mark.usefixtures("generates_code")
def test_what_is_kept_for_the_backward_is_not_gathered_again(cluster: Clusters) -> None:
    layer = 32 * 32 * 4
    for gathered in cluster(2).run(kept_body, limit=280):
        assert gathered == [4 * layer, 4 * layer]  # three forward; backward needs two, and has one of them


class Attention(nn.Module):
    """Attention is a random operation, even without dropout: what recomputes it keeps a generator's state."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class MultiLayer(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Every expert for every row, weighted by the router's choice of two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.up = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        gate = torch.zeros_like(x[..., :3]).scatter(-1, chosen, weights)
        return x + torch.einsum("btd,edf,bte->btf", x, self.up, gate)


def keep_matrices(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    keep = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


RECOMPUTING: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, keep_matrices),
    },
}


class Recomputing(nn.Module):
    """One block of each kind, each recomputed as `how` says."""

    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention(), MultiLayer(), Experts()])
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.how)
        return x.square().mean()


def recomputing_body(context: Context) -> dict[str, tuple[float, str]]:
    """How far generated code's losses are from eager training's, and how the model was compiled."""
    found = {}
    for name, how in RECOMPUTING.items():
        losses: dict[bool, list[float]] = {False: [], True: []}
        for compile in losses:
            torch.manual_seed(3)
            model = Recomputing(how)
            engine = zero.initialize(model, adamw(model), zero.Config(compile=compile, timeout=100))
            for step in range(3):
                x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(2 * step + context.rank))
                loss = engine(x.to(device_of(model)).requires_grad_())
                train_on(engine, loss)
                losses[compile].append(loss.item())
        found[name] = scaled_error(losses[True], losses[False]), engine.explain().mode
    return found


@pytest.mark.usefixtures("generates_code")
def test_whatever_a_checkpoint_recomputes(cluster: Clusters, device: str) -> None:
    for found in cluster(2).run(recomputing_body, limit=280):
        assert {mode for _, mode in found.values()} == {"graph"}
        assert max(error for error, _ in found.values()) < (1e-5 if device == "cpu" else 1e-3), found


@torch.library.custom_op("zero_tests::uncompiled", mutates_args=())
def uncompiled(x: Tensor, where: str) -> Tensor:
    """A copy of `x` that inductor cannot compile in the backward."""
    return x.clone()


uncompiled.register_fake(lambda x, where: torch.empty_like(x))
uncompiled.register_autograd(lambda context, gradient: (uncompiled(gradient, "backward"), None))


def lower_in_forwards_only(x: Any, where: str) -> Any:
    if where == "backward":
        raise NotImplementedError("as the test wants")
    return clone(x)


class Uncompiled(MultiLayer):
    """Two layers with dropout, and an operation that inductor cannot compile."""

    def forward(self, x: Tensor) -> Tensor:
        return uncompiled(F.dropout(super().forward(x), 0.3), "forward")


class Chain(nn.Module):
    """Blocks that are recomputed; with a graph break between them if it is `broken`."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Uncompiled() for _ in range(2))
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.broken:
                torch._dynamo.graph_break()
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def train_uncompiled(context: Context, compile: zero.Compile, broken: bool) -> tuple[list[float], str, str]:
    torch.manual_seed(3)
    model = Chain(broken)
    engine = zero.initialize(
        model, adamw(model), zero.Config(compile=compile, units=(Uncompiled,), timeout=60)
    )
    losses = []
    torch.manual_seed(5 + context.rank)
    for step in range(3):
        loss = engine(torch.full((2, 4, WIDTH), 0.1 * (step + 1), device=device_of(model)))
        train_on(engine, loss)
        losses.append(loss.item())
    return losses, engine.explain().mode, engine.explain().not_generated


def uncompiled_body(context: Context, broken: bool) -> list[tuple[bool, int, str, bool]]:
    """Where it fails: in the backward; in the forward, for want of a C++ compiler."""
    register_lowering(torch.ops.zero_tests.uncompiled.default)(lower_in_forwards_only)
    no_compiler = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
    one_by_one, _, none = train_uncompiled(context, zero.Compile(inner="aot_eager"), broken)
    found = []
    for settings in ({}, no_compiler):
        with warnings.catch_warnings(record=True) as caught, inductor_config.patch(settings):
            warnings.simplefilter("always")
            generated, mode, why = train_uncompiled(context, zero.Compile(), broken)
        told = sum("inductor could not compile" in str(warning.message) for warning in caught)
        found.append((generated == one_by_one, told, mode, bool(why) and not none))
    return found


@pytest.mark.parametrize(("broken", "mode"), [(False, "graph"), (True, "units")])
def test_what_inductor_cannot_compile_runs_one_by_one(
    cluster: Clusters, device: str, broken: bool, mode: str
) -> None:
    if device != "cpu":
        pytest.skip("the C++ compiler generates code for the host")
    first, second = cluster(2).run(uncompiled_body, broken=broken, limit=120)
    assert first == [(True, 1, mode, True)] * 2
    assert second == [(True, 0, mode, True)] * 2, "rank 0 warns for all"
