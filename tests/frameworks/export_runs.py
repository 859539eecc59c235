"""Bodies that save by engine.save_pretrained, beside what transformers and PEFT save."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import zero
from accelz.conformance.cluster import Context
from tests.frameworks.jobs import begin_job, language_model
from tests.frameworks.peft_runs import model_with
from tests.zero.helpers.told import raised

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def tied() -> Any:
    torch.manual_seed(2)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


def experts() -> Any:
    torch.manual_seed(2)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3))


def weights(folder: str) -> dict[str, torch.Tensor]:
    files = sorted(Path(folder).rglob("*.safetensors"))
    return {f"{f.parent.name}/{n}": t for f in files for n, t in load_file(f).items()}


def check_same(ours: str, theirs: str) -> None:
    found, wanted = (
        weights(ours),
        {n.replace(Path(theirs).name, Path(ours).name): t for n, t in weights(theirs).items()},
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    names = sorted(n for n in os.listdir(theirs) if not n.startswith("model"))
    assert sorted(n for n in os.listdir(ours) if not n.startswith("model")) == names


def saved(context: Context, folder: str) -> None:
    """Models of transformers: the names and values of its own files, which from_pretrained reads."""
    begin_job(context)
    for make in (tied, experts):
        model = make()
        engine = zero.initialize(model, config=zero.Config(stage=3, precision="bf16"))
        ours, theirs = f"{folder}/{make.__name__}", f"{folder}/{make.__name__}-theirs"
        engine.save_pretrained(ours, max_shard_size=3000)
        engine.save_pretrained(f"{ours}-wide", dtype=torch.float32)
        state = engine.state_dict()
        if context.rank:
            continue
        model.save_pretrained(theirs, state_dict=dict(state), max_shard_size=3000)
        check_same(ours, theirs)
        assert json.loads(Path(f"{ours}-wide/config.json").read_text())["dtype"] == "float32"
        for path, dtype in ((ours, torch.bfloat16), (f"{ours}-wide", torch.float32)):
            loaded = AutoModelForCausalLM.from_pretrained(path)
            assert loaded.dtype == dtype
            assert all(torch.equal(v.bfloat16(), state[n]) for n, v in loaded.state_dict().items())
    last = dist.new_group([context.size - 1])  # an engine without torch's first rank
    if context.rank == context.size - 1:
        engine = zero.initialize(tied(), config=zero.Config(stage=3), process_group=last)
        engine.save_pretrained(f"{folder}/last")
        loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/last").state_dict()
        assert all(torch.equal(value, loaded[name]) for name, value in engine.state_dict().items())


def adapted(kind: str) -> Any:
    """own: an adapter of transformers, without a model of PEFT around."""
    if kind != "own":
        return model_with(kind)
    model = language_model()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return model


@mock.patch("transformers.integrations.peft.MIN_PEFT_VERSION", "0")  # it does not use what is newer
def adapters(context: Context, folder: str) -> None:
    """Models of PEFT: what it saves of an unsharded model, without gathering the base."""
    begin_job(context)
    for kind in ("dora", "prompt", "own"):
        plain, model = adapted(kind), adapted(kind)
        if kind == "dora":
            plain.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
            model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
        model.load_state_dict(plain.state_dict())
        engine = zero.initialize(model, config=zero.Config(stage=3))
        engine.save_pretrained(f"{folder}/{kind}")
        if kind == "prompt":
            assert "dtype=..." in raised(partial(engine.save_pretrained, folder, dtype=torch.bfloat16))
        else:
            engine.save_pretrained(f"{folder}/{kind}-narrow", dtype=torch.bfloat16)
        if context.rank == 0:
            plain.save_pretrained(f"{folder}/{kind}-theirs")
            check_same(f"{folder}/{kind}", f"{folder}/{kind}-theirs")
        if context.rank == 0 and kind != "prompt":
            assert {value.dtype for value in weights(f"{folder}/{kind}-narrow").values()} == {torch.bfloat16}
