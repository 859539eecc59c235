"""Gathers in 8 bits: training uses rounded weights, and everything else exact ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import zero
from accelz import Kernels
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import LanguageModel, device_of, tokens
from tests.zero.helpers.training import (
    Run,
    adamw,
    relative_error,
    same_bits,
    scaled_error,
    state_error,
    train_mixed_reference,
    train_reference,
    train_zero,
)
from zero.communication.quantised import QUANT_BLOCK
from zero.config.training import dtype_named

STEPS = 4
LAYERS = 3


class Rounded(nn.Module):
    """A model whose matrices are rounded to codes in every forward; gradients pass through the rounding."""

    def __init__(self, model: nn.Module, codes: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.codes = codes

    def forward(self, *inputs: Tensor) -> Any:
        named = self.model.named_parameters()
        values = {n: _StraightThrough.apply(p, self.codes) if p.dim() > 1 else p for n, p in named}
        return functional_call(self.model, values, inputs)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        return rounded(parameter, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def rounded(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """What a gather in `dtype` makes of a (dense) matrix."""
    values = torch.empty_like(parameter)
    source = parameter.detach().as_strided((parameter.numel(),), (1,))
    codes = torch.empty(parameter.numel(), dtype=dtype)
    scales = torch.empty(-(-parameter.numel() // QUANT_BLOCK))
    kernels = Kernels()
    kernels.quantise(codes, scales, source, QUANT_BLOCK)
    kernels.dequantise(values.as_strided(source.shape, (1,)), codes, scales, QUANT_BLOCK)
    return values


def language_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(tokens(step, rank, model))["loss"]


def under_autocast(model: nn.Module, step: int, rank: int) -> Tensor:
    with torch.autocast(device_of(model).type, torch.bfloat16):
        return language_loss(model, step, rank)


def fresh() -> LanguageModel:
    torch.manual_seed(3)
    return LanguageModel(layers=LAYERS)


def parity_body(context: Context, path: str) -> dict[str, dict[str, float]]:
    found = {}
    ways = _ways(path)
    for name, chosen in (("int8", ways.keys()), ("fp8", ("plain", "small units", "on disk"))):
        codes = dtype_named(name)
        assert codes is not None
        expected = train_reference(context, Rounded(fresh(), codes), language_loss, steps=STEPS)
        expected.state = {key.removeprefix("model."): value for key, value in expected.state.items()}
        first = None
        for what in chosen:
            settings = ways[what]
            config = zero.Config(gather_dtype=name, timeout=20, **settings)
            run = train_zero(context, fresh(), language_loss, config, steps=STEPS)
            first = first or run
            found[f"{name} {what}"] = {
                "loss": relative_error(run.losses, expected.losses),
                "state": state_error(run.state, expected.state) if run.state else 0.0,
                "same": "prefetch" not in settings or same_bits(run, first),
            }
    return found


def _ways(path: str) -> dict[str, dict[str, Any]]:
    return {
        "plain": {},
        "on demand": {"prefetch": 0},
        "far ahead": {"prefetch": 3},
        "small units": {"units": ("Linear", "Embedding")},
        "on the host": {"offload": zero.Offload(params="host", optimizer="host")},
        "on disk": {"offload": zero.Offload(params="disk", optimizer="disk", path=path)},
    }


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.host)])
def test_it_is_training_with_rounded_weights(cluster: Clusters, size: int, tmp_path: Path) -> None:
    """This holds for any number of ranks and any tier of shards; when gathers begin changes no bit."""
    for per_rank in cluster(size).run(parity_body, path=str(tmp_path), limit=120):
        for way, found in per_rank.items():
            assert found["loss"] < 1e-5, (way, found)
            assert found["state"] < 1e-5, (way, found)
            assert found["same"], way


def narrow_body(context: Context) -> dict[str, float]:
    """Distances from unsharded training with rounded weights."""
    config = zero.Config(precision="bf16", gather_dtype="int8", timeout=20)
    model = Rounded(fresh(), torch.int8)
    expected = train_mixed_reference(context, model, language_loss, gentle, STEPS, torch.bfloat16)
    run = train_zero(context, fresh(), language_loss, config, gentle, STEPS)
    found = {"bf16": scaled_error(run.losses, expected.losses)}
    config = zero.Config(gather_dtype="int8", timeout=20)
    expected = train_reference(context, Rounded(fresh(), torch.int8), under_autocast, gentle, STEPS)
    run = train_zero(context, fresh(), under_autocast, config, gentle, STEPS)
    return found | {"autocast": scaled_error(run.losses, expected.losses)}


def gentle(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with a learning rate at which a few steps do not amplify rounding."""
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def test_with_16_bits(cluster: Clusters) -> None:
    for found in cluster(2).run(narrow_body):
        assert found["bf16"] < 1e-3
        assert found["autocast"] < 1e-2


def compiled_body(context: Context) -> dict[str, float]:
    """Distances of the compiled graphs' losses from the eager engine's."""
    compiling = zero.Compile(inner="aot_eager")
    found = {}
    for loss in (language_loss, under_autocast):
        eager, graph = (
            train_zero(
                context,
                fresh(),
                loss,
                zero.Config(gather_dtype="int8", compile=compiled, timeout=20),
                gentle,
                STEPS,
            )
            for compiled in (None, compiling)
        )
        found[loss.__name__] = scaled_error(graph.losses, eager.losses)
    return found


def test_graphs_gather_the_same_values(cluster: Clusters) -> None:
    for found in cluster(2).run(compiled_body, limit=120):
        assert found["language_loss"] < 1e-5
        assert found["under_autocast"] < 5e-3


def alone_body(context: Context) -> bool:
    runs = [
        train_zero(context, fresh(), language_loss, zero.Config(gather_dtype=dtype), steps=STEPS)
        for dtype in (None, "int8")
    ]
    return same_bits(*runs)


def test_one_rank_gathers_nothing_and_rounds_nothing(cluster: Clusters) -> None:
    assert cluster(1).run(alone_body) == [True]


def traffic_body(context: Context) -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    config = zero.Config(gather_dtype="int8", units=("Linear",), prefetch=0, timeout=20)
    engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    x = torch.ones(2, 256, device=engine.accelerator.device)
    engine.backward(engine(x).square().mean())
    engine.step()
    engine.traffic.clear()
    with torch.no_grad():
        engine(x)
    return {"calls": engine.traffic.calls["all_gather"], "bytes": engine.traffic.bytes["all_gather"]}


def test_bytes_are_those_of_codes_scales_and_vectors(cluster: Clusters) -> None:
    codes, scales, vector = 256 * 256, 256 * 256 // QUANT_BLOCK * 4, 256 * 4
    for found in cluster(2).run(traffic_body):
        assert found == {"calls": 3 * 3, "bytes": 3 * (codes + scales + vector)}


def waiting_body(context: Context) -> dict[str, int]:
    """Bytes of device memory that a gather takes while it is under way, and when it is done."""
    model = nn.Linear(256, 256)
    config = zero.Config(gather_dtype="int8", timeout=20)
    engine = zero.initialize(nn.Sequential(model), torch.optim.SGD(model.parameters(), lr=0.1), config)
    (unit,), memory = engine.units, context.accelerator.memory
    fmt = unit.format_for(None)
    unit.start_gather(fmt)
    unit.gather(fmt, bind=False)  # warms up the staging of collectives
    unit.release()
    before = memory.stats().allocated
    unit.start_gather(fmt)
    found = {"under way": memory.stats().allocated - before}
    unit.gather(fmt, bind=False)
    found["done"] = memory.stats().allocated - before
    unit.release()
    return found | {"released": memory.stats().allocated - before}


@pytest.mark.usefixtures("exact")
def test_what_waits_takes_a_byte_an_element(cluster: Clusters) -> None:
    codes, scales, vector = 256 * 256, 256 * 256 // QUANT_BLOCK * 4, 256 * 4
    for found in cluster(2).run(waiting_body):
        assert found == {"under way": codes + scales + vector, "done": 4 * codes + vector, "released": 0}


def exact_body(context: Context) -> dict[str, bool]:
    """zero.gathered shows and writes exact values, inside and outside of forwards."""
    exact = fresh()
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(gather_dtype="int8", timeout=20))
    batch = tokens(0, context.rank, model)
    found = {"computes with rounded": _seen(model.blocks[2].up, lambda: engine(batch), exact, False)}
    with zero.gathered(model):
        found["shows exact"] = _equal(model, exact)
        found["computes with what it shows"] = _seen(model.blocks[2].up, lambda: engine(batch), exact, True)
        with torch.autocast(device_of(model).type, torch.bfloat16), torch.no_grad():
            engine(batch)
        found["still shows exact"] = _equal(model, exact)
    with zero.gathered(model, write_rank=0):
        pass
    masters = {n: engine.full_master(n) for n, p in exact.named_parameters() if p.requires_grad}
    found["writes exact"] = all(torch.equal(masters[n].cpu(), exact.get_parameter(n)) for n in masters)
    state = engine.state_dict()
    found["state"] = not state or _same(state, exact.state_dict())
    engine.backward(engine(batch)["loss"])
    return found


def _equal(model: nn.Module, exact: nn.Module) -> bool:
    return _same(dict(model.named_parameters()), dict(exact.named_parameters()))


def _same(state: dict[str, Any], exact: dict[str, Any]) -> bool:
    return state.keys() == exact.keys() and all(
        torch.equal(state[name].detach().cpu(), value.detach()) for name, value in exact.items()
    )


def _seen(module: nn.Linear, forward: Any, exact: LanguageModel, as_it_is: bool) -> bool:
    """Whether a forward computes with exact weights, or with rounded ones, in `module`."""
    seen: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda m, _: seen.append(m.weight.detach().cpu().clone()))
    with torch.no_grad():
        forward()
    hook.remove()
    weight = exact.blocks[2].up.weight.detach()
    return torch.equal(seen[0], weight if as_it_is else rounded(weight, torch.int8))


def test_gathered_and_state_are_exact(cluster: Clusters) -> None:
    for found in cluster(2).run(exact_body):
        assert all(found.values()), found


def peeking_body(context: Context, gather_dtype: Any) -> dict[str, bool]:
    """A hook that gathers a unit in the middle of its own forward changes nothing of the training."""
    config = zero.Config(gather_dtype=gather_dtype, timeout=20)
    quiet = train_zero(context, fresh(), language_loss, config, steps=STEPS)
    model, exact = fresh(), fresh()
    seen: list[bool] = []

    def peek(module: nn.Module, _: Any) -> None:
        with zero.gathered(module.weight):
            if not seen:
                seen.append(torch.equal(module.weight.detach().cpu(), exact.blocks[1].up.weight.detach()))

    model.blocks[1].up.register_forward_pre_hook(peek)
    run = train_zero(context, model, language_loss, config, steps=STEPS)
    return {"shows exact": seen == [True], "changes nothing": same_bits(run, quiet)}


@pytest.mark.parametrize("gather_dtype", [None, "int8"])
def test_gathered_inside_a_forward_leaves_it_its_values(cluster: Clusters, gather_dtype: Any) -> None:
    for found in cluster(2).run(peeking_body, gather_dtype=gather_dtype):
        assert all(found.values()), found


def checkpoint_body(context: Context, path: str, load: bool, gather_dtype: str | None) -> Run:
    model = fresh()
    config = zero.Config(gather_dtype=gather_dtype, timeout=20)
    engine = zero.initialize(model, adamw(model), config)
    run = Run()
    if load:
        engine.load_checkpoint(path)
    else:
        for step in range(3):
            engine.backward(language_loss(model, step, 0))
            engine.step()
        engine.save_checkpoint(path)
    run.state = engine.state_dict()
    return run


@pytest.mark.parametrize(("size", "after"), [(2, "int8"), (3, "int8"), (3, None), (1, "fp8")])
def test_checkpoints_do_not_tell(cluster: Clusters, tmp_path: Path, size: int, after: str | None) -> None:
    path = str(tmp_path / "saved")
    saved = cluster(2).run(checkpoint_body, path=path, load=False, gather_dtype="int8")[0]
    loaded = cluster(size).run(checkpoint_body, path=path, load=True, gather_dtype=after)[0]
    assert same_bits(loaded, saved)


def adapter_body(context: Context) -> dict[str, Any]:
    """A frozen base in 16 bits and adapters in fp32; both travel in 8."""
    model = fresh()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up" in name)
        if "up" not in name:
            parameter.data = parameter.data.bfloat16()
    model.shift = model.shift.bfloat16()
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine = zero.initialize(model, optimizer, zero.Config(gather_dtype="fp8", timeout=20))
    losses = []
    for step in range(STEPS):
        with torch.autocast(device_of(model).type, torch.bfloat16):
            loss = language_loss(model, step % 2, context.rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    state = engine.state_dict()
    frozen = not state or all(torch.equal(state[name], value) for name, value in before.items())
    return {"losses": losses, "frozen": frozen}


def test_frozen_parameters_travel_rounded_and_stay_as_they_are(cluster: Clusters) -> None:
    for found in cluster(2).run(adapter_body):
        assert found["frozen"]
        assert found["losses"][-1] < found["losses"][0]


def evaluating_body(context: Context) -> list[float]:
    """Of codes, and of integers, which travel as bytes."""
    found = []
    for gather_dtype in ("int8", None):
        model = fresh()
        for block in model.blocks:
            block.table = nn.Parameter(torch.ones(9, dtype=torch.int32), requires_grad=False)
        engine = zero.initialize(model, adamw(model), zero.Config(gather_dtype=gather_dtype, timeout=20))  # type: ignore[arg-type]
        losses = []
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                for unit in engine.units:
                    unit.start_gather(unit.format_for(None))
            losses.append(language_loss(model, 0, context.rank).item())
        found.append(losses[1] - losses[0])
    return found


def test_what_an_evaluation_has_begun_to_gather_arrives_after_it(cluster: Clusters) -> None:
    for found in cluster(2).run(evaluating_body):
        assert found == [0.0, 0.0]


@contextmanager
def _raising(module: nn.Module) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    hook = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def failing_body(context: Context) -> dict[str, bool]:
    """A forward that fails, alone and in zero.gathered: pending gathers are dropped, exact units stay."""
    exact = fresh()
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(gather_dtype="int8", prefetch=2, timeout=20))
    batch = tokens(0, context.rank, model)
    engine.backward(engine(batch)["loss"])  # gives the next forward an order to prefetch by
    found = {}
    with _raising(model.blocks[1].up), pytest.raises(RuntimeError, match="planted"):
        engine(batch)
    with zero.gathered(model.head.weight):
        with _raising(model.blocks[1].up), pytest.raises(RuntimeError, match="planted"):
            engine(batch)
        found["shown"] = torch.equal(model.head.weight.detach().cpu(), exact.head.weight.detach())
    found["over"] = not any(unit.held for unit in engine.units)
    engine.zero_grad()
    engine.backward(engine(batch)["loss"])
    found["goes on"] = engine.step()
    found["released"] = all(unit.idle for unit in engine.units)
    return found


def test_a_failing_forward_leaves_nothing_on_its_way(cluster: Clusters) -> None:
    for found in cluster(2).run(failing_body):
        assert all(found.values()), found


def mismatch_body(context: Context) -> str:
    model = fresh()
    config = zero.Config(gather_dtype="int8" if context.rank else None, timeout=20)
    with pytest.raises(zero.RankMismatchError) as caught:
        zero.initialize(model, adamw(model), config)
    return str(caught.value)


def test_ranks_that_disagree_are_told(cluster: Clusters) -> None:
    assert all("Config(gather_dtype=...)" in said for said in cluster(2).run(mismatch_body))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_it_is_refused(stage: Any) -> None:
    with pytest.raises(zero.ConfigError, match="set stage=3"):
        zero.Config(stage=stage, gather_dtype="int8")


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(zero.ConfigError, match=r"gather_dtype.*int8"):
        zero.Config(gather_dtype="int4")
