"""What frameworks train with in tests: one job per body, a small language model, its data and a tokenizer."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import LlamaConfig, LlamaForCausalLM

from accelz.conformance.cluster import Context
from tests.frameworks.hosted import use_the_host

VOCABULARY = 64


def begin_job(context: Context) -> None:
    """Let this rank look as if a launcher had just started it: frameworks keep what they know of the job."""
    rank, size = str(context.rank), str(context.size)
    os.environ |= {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(context.accelerator.device)
    if context.accelerator.name == "sim":
        use_the_host("PrivateUse1")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()
    torch.manual_seed(7)


def language_model(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    """Two layers of width 32, the same for one seed on every rank."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **settings,
    )
    return LlamaForCausalLM(config)


def token_rows(rows: int, length: int = 12, seed: int = 1) -> torch.Tensor:
    """(rows, length), int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def on_host(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Tensors as arrays, which ranks can send back to the test."""
    return {name: value.detach().float().cpu().numpy() for name, value in state.items()}


def assert_same_log(found: Any, wanted: Any, within: float, nan_ok: bool = False) -> None:
    """Entries of two logs, without times. nan_ok: both may have a norm that is none."""
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        mine, theirs = ({k: v for k, v in entry.items() if "time" not in k} for entry in (mine, theirs))
        assert mine == pytest.approx(theirs, rel=within, abs=min(within, 1e-6), nan_ok=nan_ok)


def furthest(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest difference between values of the same names."""
    assert found.keys() == wanted.keys()
    return max((float(abs(found[name] - wanted[name]).max()) for name in wanted), default=0.0)
