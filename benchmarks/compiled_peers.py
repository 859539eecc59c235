"""The peers of the compiled path: fp32 parameters under bf16 autocast, on the CPU over gloo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

import accelz
import zero
from accelz import StorageSwap
from accelz.gloo import GlooLanes
from benchmarks.machine import generates_code
from benchmarks.model import Decoder
from benchmarks.peers import ADAMW, Peer, Setting, TorchPeer, build_fsdp2

Products = Literal["tensorwise", "rowwise", "tensorwise, codes travel"]

ROOMY = 1 << 30  # bytes; enough for every unit


class AutocastPeer(Peer):
    """zero at stage 3 with fp32 parameters under bf16 autocast. gather_dtype: as in `zero.Config`.
    products: the scales with which blocks' layers multiply in float8, as torchao names them; None: in bf16.
    """

    def __init__(
        self,
        model: Decoder,
        setting: Setting,
        compile: zero.Compile | None,
        gather_dtype: Literal["int8", "fp8"] | None = None,
        products: Products | None = None,
    ) -> None:
        if products is not None:
            multiply_in_float8(model, products)
        accelerator = accelz.current()
        if accelerator.device.type == "cpu":
            accelerator.collectives = GlooLanes()
            accelerator.flat_buffers = StorageSwap(accelerator.device)
        elif compile is not None and not generates_code(accelerator.device.type):
            compile = compile.model_copy(update={"inner": "aot_eager"})
        self._device = accelerator.device.type
        config = zero.Config(
            compile=compile,
            capture_step=compile is not None and compile.graphs,
            gather_dtype=gather_dtype,
            timeout=setting.timeout,
        )
        self._engine = zero.initialize(model, torch.optim.AdamW(model.parameters(), **ADAMW), config)
        self._engine.traffic.clear()

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self._device, torch.bfloat16):
            loss: Tensor = self._engine(inputs, targets)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def traffic(self) -> dict[str, int]:
        return dict(self._engine.traffic.bytes)


class AutocastTorchPeer(Peer):
    """Another peer, with its steps under bf16 autocast."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16):
            return self._peer.step(inputs, targets)


def build_fsdp2_autocast(model: Decoder, setting: Setting) -> Peer:
    """FSDP2 without a policy, under autocast: values travel in fp32, and the computation is zero's graph."""
    return AutocastTorchPeer(build_fsdp2_compiled(model, replace(setting, precision="fp32")))


def build_fsdp2_compiled(model: Decoder, setting: Setting) -> Peer:
    """FSDP2 with a bf16 mixed-precision policy, compiled as a whole; it breaks its graph at its hooks."""
    peer = build_fsdp2(model, setting)
    assert isinstance(peer, TorchPeer)
    model.compile()
    return peer


def multiply_in_float8(model: Decoder, products: Products) -> None:
    """Have torchao convert the blocks' layers; the head's logits stay in bf16. Weights that travel as the
    codes that are multiplied are compiled unit by unit, others in one graph."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe, _, codes = products.partition(", ")
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, enable_fsdp_float8_all_gather=bool(codes))
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "head")


NOT_FUSED, EAGER, ONE_AHEAD = "zero3, all ahead, not fused", "zero3, eager", "zero3, one ahead"
FSDP2, FSDP2_AUTOCAST = "fsdp2, compiled", "fsdp2, compiled, autocast"
PEERS: dict[str, Callable[[Decoder, Setting], Peer]] = {
    ONE_AHEAD: partial(AutocastPeer, compile=zero.Compile()),
    "zero3, all ahead": partial(AutocastPeer, compile=zero.Compile(prefetch_budget=ROOMY)),
    NOT_FUSED: partial(AutocastPeer, compile=zero.Compile(prefetch_budget=ROOMY, fuse_casts=False)),
    "zero3, persistent": partial(
        AutocastPeer, compile=zero.Compile(prefetch_budget=ROOMY, persist_budget=ROOMY)
    ),
    EAGER: partial(AutocastPeer, compile=None),
    "zero3, all ahead, int8": partial(
        AutocastPeer, compile=zero.Compile(prefetch_budget=ROOMY), gather_dtype="int8"
    ),
    "zero3, eager, int8": partial(AutocastPeer, compile=None, gather_dtype="int8"),
    FSDP2: build_fsdp2_compiled,
    FSDP2_AUTOCAST: build_fsdp2_autocast,
}
ON_REQUEST: dict[str, Callable[[Decoder, Setting], Peer]] = {
    "zero3, graphs": partial(AutocastPeer, compile=zero.Compile(graphs=True)),
    "zero3, float8 tensorwise": partial(AutocastPeer, compile=zero.Compile(), products="tensorwise"),
    "zero3, float8 rowwise": partial(AutocastPeer, compile=zero.Compile(), products="rowwise"),
    "zero3, float8 tensorwise, codes travel": partial(
        AutocastPeer, compile=zero.Compile(), products="tensorwise, codes travel"
    ),
    "zero3, float8 tensorwise, eager": partial(AutocastPeer, compile=None, products="tensorwise"),
}
"""Peers that need torchao, or a device that captures graphs, and that round otherwise: their losses are
compared by `loss_curves` and `replayed`."""
