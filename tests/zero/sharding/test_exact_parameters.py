"""Storage formats and packed weights are moved, never converted: they are not numbers of their dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import device_of
from tests.zero.helpers.training import adamw
from zero.consolidate import Options, consolidate, open_source

WIDTH = 16
FORMATS = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
)


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().cpu().view(torch.uint8)


class Packed(nn.Parameter):
    """As libraries for quantisation mark their weights."""


class Unpacking(nn.Module):
    """A layer that computes with what its frozen weight's bytes stand for."""

    def __init__(self, dtype: torch.dtype, kind: type[nn.Parameter] = nn.Parameter) -> None:
        super().__init__()
        packed = torch.randint(0, 250, (WIDTH, WIDTH * dtype.itemsize), dtype=torch.uint8)
        self.packed = kind(packed.view(dtype).t(), requires_grad=False)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scales", packed[:, :4].clone().view(torch.float8_e4m3fn))
        self.dtype = dtype

    def forward(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        assert (self.packed.dtype, self.scales.dtype) == (self.dtype, torch.float8_e4m3fn)
        assert kept is None or kept.dtype is torch.float8_e5m2
        unpacked = self.packed.t().view(torch.uint8)[:, :WIDTH]
        return x + torch.tanh(linear(x, (unpacked.to(x.dtype) - 125) / 100) + self.linear(x))


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, kind: type[nn.Parameter] = nn.Parameter) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Unpacking(dtype, kind) for _ in range(3))

    def forward(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, kept)
        return x


def built(dtype: torch.dtype, kind: type[nn.Parameter] = nn.Parameter) -> Model:
    torch.manual_seed(3)
    return Model(dtype, kind)


def losses(engine: zero.Engine, steps: int = 3) -> list[float]:
    found = []
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0)).to(device_of(engine.module))
    for _ in range(steps):
        loss = engine(x, torch.zeros(3).to(torch.float8_e5m2)).float().square().mean()
        train_on(engine, loss)
        found.append(loss.item())
    return found


def format_body(context: Context, name: str, config: dict[str, Any], path: str) -> None:
    dtype = getattr(torch, name)
    model, before = built(dtype), bits_of(built(dtype).layers[1].packed)
    if context.rank:
        model.layers[1].packed.data.view(torch.uint8).zero_()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, **config))
    expected = losses(engine)
    assert expected == sorted(expected, reverse=True)
    with zero.gathered(model.layers[1].packed):
        assert torch.equal(bits_of(model.layers[1].packed), before)
    state = engine.state_dict()
    if context.rank == 0:
        assert state["layers.1.packed"].dtype is dtype
        assert torch.equal(bits_of(state["layers.1.packed"]), before)
    engine.save_checkpoint(path)
    with zero.gathered(model.layers[1].packed, write_rank=0):
        model.layers[1].packed.data.view(torch.uint8).zero_()
    engine.load_checkpoint(path)
    with zero.gathered(model.layers[1].packed):
        assert torch.equal(bits_of(model.layers[1].packed), before)
    engine.load_state_dict(state)
    with zero.gathered(model.layers[1].packed):
        assert torch.equal(bits_of(model.layers[1].packed), before)


CONFIGS: dict[str, dict[str, Any]] = {
    "model": {"precision": "model"},
    "bf16": {"precision": "bf16", "cast_buffers": True},
    "fp32, stage 0": {"precision": "fp32", "stage": 0, "gradient_accumulation_steps": 1},
    "coded": {"gather_dtype": "int8"},
    "host": {"offload": zero.Offload(params="host", optimizer="host"), "gradient_accumulation_steps": 1},
}


@pytest.mark.parametrize("name", [str(dtype).removeprefix("torch.") for dtype in FORMATS])
@pytest.mark.parametrize("config", CONFIGS)
def test_frozen_storage_formats_keep_their_bits(
    cluster: Clusters, name: str, config: str, tmp_path: Path
) -> None:
    cluster(2).run(format_body, name=name, config=CONFIGS[config], path=str(tmp_path / "checkpoint"))


def disk_body(context: Context, folder: str) -> None:
    model = built(torch.float4_e2m1fn_x2)
    before = bits_of(model.layers[2].packed)
    offload = zero.Offload(params="disk", optimizer="disk", path=folder)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, offload=offload))
    losses(engine)
    with zero.gathered(model.layers[2].packed):
        assert torch.equal(bits_of(model.layers[2].packed), before)


def test_storage_formats_on_disk(cluster: Clusters, tmp_path: Path) -> None:
    cluster(2).run(disk_body, folder=str(tmp_path))


def packed_body(context: Context, config: dict[str, Any], said: str, dtype: torch.dtype) -> None:
    """Weights packed in numbers of 16 or 32 bits, which look like any other."""
    model = built(dtype, Packed if said == "class" else nn.Parameter)
    if said == "attribute":
        for layer in model.layers:
            layer.packed.quant_state = object()
    before = bits_of(model.layers[1].packed)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20, **config))
    found = losses(engine)
    assert found == sorted(found, reverse=True)
    seen = []
    layer = model.layers[1]  # gathered while what is in it computes
    layer.linear.register_forward_hook(lambda module, args, output: seen.append(bits_of(layer.packed)))
    with torch.autocast(device_of(model).type, torch.bfloat16, enabled=config.get("precision") is None):
        engine(torch.ones(2, WIDTH, device=device_of(model)))
    assert torch.equal(seen[0], before)


PACKED: dict[str, tuple[dict[str, Any], str, torch.dtype]] = {
    "class, coded": ({"gather_dtype": "int8"}, "class", torch.bfloat16),
    "attribute, coded": ({"gather_dtype": "fp8"}, "attribute", torch.bfloat16),
    "class, cast": ({"precision": "bf16"}, "class", torch.float32),
    "named, cast": ({"precision": "bf16", "exact_parameters": "*.packed"}, "", torch.float32),
    "named, coded": ({"gather_dtype": "int8", "exact_parameters": ["layers.*.packed"]}, "", torch.bfloat16),
    "function": (
        {"gather_dtype": "int8", "exact_parameters": lambda name, parameter: not parameter.requires_grad},
        "",
        torch.bfloat16,
    ),
}


@pytest.mark.parametrize("way", PACKED)
def test_packed_weights_keep_their_bits(cluster: Clusters, way: str) -> None:
    config, said, dtype = PACKED[way]
    if way == "function":  # a lambda does not travel
        cluster(2).run(by_function_body, dtype=dtype)
    else:
        cluster(2).run(packed_body, config=config, said=said, dtype=dtype)


def by_function_body(context: Context, dtype: torch.dtype) -> None:
    packed_body(context, PACKED["function"][0], "", dtype)


def trained_body(context: Context) -> None:
    """A router in fp32 within a model in bf16 and coded gathers."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(160, 160), nn.Linear(160, 160)) for _ in range(2)))
    exact = model[1][1].weight.detach().clone()
    other = model[1][0].weight.detach().clone()
    config = zero.Config(timeout=20, precision="bf16", gather_dtype="int8", exact_parameters="1.1.*")
    engine = zero.initialize(model, adamw(model), config)
    seen: dict[int, Tensor] = {}
    model[1][1].register_forward_pre_hook(lambda module, args: args[0].float())
    for index in (0, 1):
        model[1][index].register_forward_pre_hook(
            lambda module, args, index=index: seen.update({index: module.weight.detach().clone()})
        )
    engine.backward(engine(torch.ones(2, 160, device=device_of(model))).square().mean())
    assert engine.step()
    if context.rank == 0:
        assert torch.equal(seen[1].cpu(), exact)
    assert seen[1].dtype is torch.float32
    assert seen[0].dtype is torch.bfloat16
    assert not torch.equal(seen[0].cpu(), other.bfloat16())


def test_a_parameter_that_is_trained_may_be_exact(cluster: Clusters) -> None:
    cluster(2).run(trained_body)


def refused_body(context: Context) -> None:
    model = built(torch.float8_e4m3fn)
    with pytest.raises(zero.ConfigError, match=r"no parameter is named 'layer\.\*'; write names as in "):
        zero.initialize(model, adamw(model), zero.Config(exact_parameters=("*.packed", "layer.*")))
    model.register_parameter("trained", nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn)))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(
        zero.ConfigError, match=r"support torch\.float8_e4m3fn .*, as trained would .*precision"
    ):
        zero.initialize(model, optimizer, zero.Config())


def test_what_is_refused(cluster: Clusters) -> None:
    cluster(1).run(refused_body)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_files_are_those_of_safetensors(dtype: torch.dtype, tmp_path: Path) -> None:
    """What is consolidated opens there, and is loaded from there."""
    model = built(dtype)
    before = bits_of(model.layers[1].packed)
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
    engine.save_checkpoint(tmp_path / "checkpoint")
    consolidate(open_source(tmp_path / "checkpoint"), tmp_path / "whole", Options())
    found = load_file(tmp_path / "whole" / "model.safetensors")["layers.1.packed"]
    assert found.dtype is dtype
    assert torch.equal(bits_of(found), before)
    other = built(dtype)
    other.layers[1].packed.data.view(torch.uint8).zero_()
    zero.load_pretrained(other, tmp_path / "whole")
    assert torch.equal(bits_of(other.layers[1].packed), before)
