"""One rank that trains LoRA adapters beside a frozen Llama, in bf16 or in bitsandbytes' NF4."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import bitsandbytes  # type: ignore[import-not-found,unused-ignore]
import peft  # type: ignore[import-not-found,unused-ignore]
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found,unused-ignore]

import accelz
import zero

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "small": {
        "num_hidden_layers": 6,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
    },
    "1b": {
        "num_hidden_layers": 22,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
}
"""Settings of LlamaConfig: 0.1 M parameters (for tests), 25 M, and 1.1 G."""

BF16, SHARDED, UNSHARDED = "lora in bf16, zero3", "qlora, zero3", "qlora, unsharded"
WAYS = (BF16, SHARDED, UNSHARDED)
LORA: dict[str, Any] = {
    "r": 16,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
POOL = 4  # batches that a rank trains on in turn


@dataclass(frozen=True)
class Turn:
    """seconds: of the timed steps. losses: of all."""

    seconds: list[float]
    losses: list[float]


class QloraRank:
    """One rank of one of WAYS. It is built empty, so that the process can be measured before the model."""

    def __init__(self, way: str, size: str, batch: int, length: int, timeout: float) -> None:
        self._way, self._size, self._timeout = way, size, timeout
        self._shape = (batch, length)
        self._steps = 0

    def parameters(self) -> int:
        """How many the base has."""
        with torch.device("meta"):
            return sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**SIZES[self._size])).parameters())

    def build(self) -> None:
        """Make the model and what trains it, and release the memory that this left behind."""
        accelz.use("cpu").bind(int(os.environ.get("LOCAL_RANK", "0")))
        model = _base(self._size, packed=self._way != BF16)
        self._model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-3)
        if self._way != UNSHARDED:
            config = zero.Config(timeout=self._timeout)
            self._engine = zero.initialize(self._model, self._optimizer, config)
        generator = torch.Generator().manual_seed(7 + int(os.environ.get("RANK", "0")))
        high = SIZES[self._size]["vocab_size"]
        self._batches = [torch.randint(high, self._shape, generator=generator) for _ in range(POOL)]
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)

    def run(self, warm: int, timed: int) -> Turn:
        """Do `warm` untimed steps, then `timed` timed ones."""
        losses, seconds = [self._step().item() for _ in range(warm)], []
        for _ in range(timed):
            start = time.perf_counter()
            losses.append(self._step().item())
            seconds.append(time.perf_counter() - start)
        return Turn(seconds, losses)

    def _step(self) -> Tensor:
        tokens = self._batches[self._steps % POOL]
        self._steps += 1
        loss: Tensor = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def _base(size: str, packed: bool) -> nn.Module:
    """A Llama with the same bf16 values in every process; `packed`, matrices of its blocks are in NF4."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**SIZES[size], use_cache=False))
    finally:
        torch.set_default_dtype(torch.float32)
    holders = [(module, name, child) for module in model.modules() for name, child in module.named_children()]
    for module, name, child in holders if packed else ():
        if isinstance(child, nn.Linear) and name in LORA["target_modules"]:
            layer = bitsandbytes.nn.Linear4bit(
                child.in_features,
                child.out_features,
                bias=False,
                compute_dtype=torch.bfloat16,
                compress_statistics=True,
                quant_type="nf4",
            )
            layer.weight.data = child.weight.data
            setattr(module, name, layer.to("cpu"))  # which packs it
    return model
