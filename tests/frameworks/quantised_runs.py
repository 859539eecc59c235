"""Models with quantised weights of torchao and bitsandbytes, and adapters that are trained beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes
import peft
import torch
import torchao.quantization as torchao
from torch import Tensor, nn
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

import zero
from accelz.conformance.cluster import Context
from zero.sharding.forms import inner_leaves, named_leaves

WIDTH = 128
Make = Callable[[Tensor], nn.Module]


def _torchao(config: Callable[[], Any]) -> Make:
    def make(values: Tensor) -> nn.Module:
        layer = _linear(values)
        torchao.quantize_(layer, config())
        return layer

    return make


def _linear(values: Tensor) -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(values.bfloat16(), requires_grad=False)
    return layer


def _nf4(values: Tensor) -> nn.Module:
    layer = _linear(values)
    layer.weight = nn.Parameter(to_nf4(values.bfloat16(), 64, 256), requires_grad=False)
    return layer


def _4bit(kind: str, storage: torch.dtype, nested: bool) -> Make:
    def make(values: Tensor) -> nn.Module:
        layer = bitsandbytes.nn.Linear4bit(
            WIDTH, WIDTH, bias=False, quant_type=kind, quant_storage=storage, compress_statistics=nested
        )
        layer.weight.data = values.bfloat16()
        return layer.to("cpu")

    return make


def _8bit(values: Tensor) -> nn.Module:
    layer = bitsandbytes.nn.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False)
    layer.weight.data = values
    return layer.to("cpu")


MADE: dict[str, Make] = {
    "torchao Int8WeightOnlyConfig": _torchao(torchao.Int8WeightOnlyConfig),
    "torchao Int8DynamicActivationInt8WeightConfig": _torchao(torchao.Int8DynamicActivationInt8WeightConfig),
    "torchao Float8WeightOnlyConfig": _torchao(torchao.Float8WeightOnlyConfig),
    "torchao IntxWeightOnlyConfig": _torchao(lambda: torchao.IntxWeightOnlyConfig(torch.int4)),  # type: ignore[attr-defined]
    "torchao to_nf4": _nf4,
    "bitsandbytes Linear4bit, nf4 in uint8": _4bit("nf4", torch.uint8, nested=True),
    "bitsandbytes Linear4bit, nf4 in bfloat16": _4bit("nf4", torch.bfloat16, nested=True),
    "bitsandbytes Linear4bit, nf4 in float32": _4bit("nf4", torch.float32, nested=False),
    "bitsandbytes Linear4bit, fp4 in float16": _4bit("fp4", torch.float16, nested=True),
    "bitsandbytes Linear8bitLt": _8bit,
}
"""How a layer's weight is quantised, by the library and the type of it."""
OTHER_STORAGE = ("bitsandbytes Linear4bit, nf4 in bfloat16", "bitsandbytes Linear4bit, fp4 in float16")
"""What is compiled as one of the others is: these differ from it in the dtype that holds the codes."""


class Adapted(nn.Module):
    """A quantised layer with a low-rank adapter."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.base = make(_weight()).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.float32 if isinstance(self.base, bitsandbytes.nn.Linear8bitLt) else torch.bfloat16
        return torch.tanh(self.base(x.to(dtype)).to(x.dtype) + self.up(self.down(x)))


def built(kind: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Adapted(MADE[kind]) for _ in range(2)))


def adapters(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0, momentum=0.9)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def bits(model: nn.Module) -> dict[str, Tensor]:
    """The bytes of the inner tensors of quantised weights."""
    inside = {id(leaf) for leaves in inner_leaves(model).values() for leaf in leaves.values()}
    named = ((name, leaf) for name, leaf in named_leaves(model) if id(leaf) in inside)
    return {name: _bytes(leaf) for name, leaf in named}


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def trained(context: Context, kinds: list[str], folder: str, **settings: Any) -> dict[str, dict[str, Any]]:
    """Train each on its own, and save it."""
    found: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        torch.compiler.reset()  # each has the same code, of which there may be few graphs
        model, before = built(kind, seed=context.rank), bits(built(kind))
        optimizer = adapters(model)
        engine = zero.initialize(model, optimizer, zero.Config(timeout=30, **settings))
        values = losses(model, optimizer)
        with zero.gathered(model):
            kept = same(bits(model), before)
        engine.save_checkpoint(f"{folder}/{kind}")
        engine.save_checkpoint(f"{folder}/{kind}, adapter", trainable_only=True)
        found[kind] = {
            "losses": values,
            "kept": kept,
            "names": sorted(before),
            "state": {name: value for name, value in engine.state_dict().items() if name not in before},
        }
    return found


def unsharded(context: Context, kinds: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        model = built(kind)
        found[kind] = {"losses": losses(model, adapters(model)), "state": model.state_dict()}
    return found


def loaded(context: Context, kinds: list[str], folder: str) -> dict[str, tuple[bool, bool]]:
    """Load into models of other values, whose weights then have the bits that were saved."""
    found = {}
    for kind in kinds:
        model = built(kind, seed=7)
        engine = zero.initialize(model, adapters(model), zero.Config(timeout=30))
        engine.load_checkpoint(f"{folder}/{kind}")
        with zero.gathered(model):
            whole = same(bits(model), bits(built(kind)))
        state = engine.state_dict(trainable_only=True)
        other = built(kind)
        again = zero.initialize(other, adapters(other), zero.Config(timeout=30))
        again.load_checkpoint(f"{folder}/{kind}, adapter")
        mine = again.state_dict(trainable_only=True)
        found[kind] = whole, all(torch.equal(mine[name], state[name]) for name in state)
    return found


class Net(nn.Module):
    """Layers that PEFT finds by their names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"proj": MADE[kind](_weight())}) for _ in range(3))
        self.requires_grad_(False)
        self.dtype = torch.float32 if "8bit" in kind else torch.bfloat16

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer["proj"](x.to(self.dtype)).to(x.dtype))
        return x


def _weight() -> Tensor:
    return torch.randn(WIDTH, WIDTH) / WIDTH**0.5


def qlora(context: Context, kinds: list[str], sharded: bool) -> dict[str, dict[str, Any]]:
    """Train PEFT's adapters on quantised layers, and save them as PEFT does."""
    found: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        torch.manual_seed(0)
        lora = peft.LoraConfig(target_modules=["proj"], r=4, init_lora_weights=False)
        model = peft.get_peft_model(Net(kind), lora)
        optimizer = adapters(model)
        engine = zero.initialize(model, optimizer, zero.Config(timeout=30)) if sharded else None
        values = losses(model, optimizer)
        state = engine.state_dict(trainable_only=True) if engine else model.state_dict()
        saved = {}
        if state:
            state = peft.get_peft_model_state_dict(model, state_dict=state)
            saved = {name: value.clone() for name, value in state.items()}
        found[kind] = {"losses": values, "saved": saved}
    return found
