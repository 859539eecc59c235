"""Models of transformers on meshes of ranks, each beside one process. Runs in rank processes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, MixtralConfig
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.utils import TransformersDeviceMesh

import zero
from accelz.conformance.cluster import Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.meshes import mesh_of
from tests.zero.helpers.optimizers import sgd
from tests.zero.helpers.training import relative_error, state_error
from zero.parallel import tokens, ulysses

STEPS, CLIP, WORDS, ROWS, LENGTH = 3, 0.05, 17, 2, 8

SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "llama, one head of keys": LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=3),
    "mixtral": MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(7)
    model: nn.Module = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="sdpa")
    return model.train()


def batch_of(step: int, row: int) -> dict[str, Tensor]:
    """Padded on the left in the first row."""
    generator = torch.Generator().manual_seed(10 * step + row)
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, : 1 + row] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, tokens.IGNORED)}


@cache
def unsharded(name: str, data: int) -> tuple[list[list[float]], list[float], dict[str, Tensor]]:
    """Losses by step and rank with other data, norms and final weights of one process."""
    model, losses, norms = model_of(name), [], []
    optimizer = sgd(model)
    for step in range(STEPS):
        each = [loss_of(model, step, row) for row in range(data)]
        torch.stack(each).mean().backward()
        losses.append([loss.item() for loss in each])
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {key: value.detach() for key, value in model.state_dict().items()}


def loss_of(model: nn.Module, step: int, row: int) -> Tensor:
    """Position ids are those that divided batches have."""
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    found: Tensor = model(**batch_of(step, row), position_ids=positions).loss
    return found


def ulysses_body(context: Context) -> dict[str, float]:
    mesh = mesh_of(("dp", 2), ("cp", 2))
    group, row = mesh.get_group("cp"), mesh.get_local_rank("dp")
    found = {}
    for stage, name in enumerate(("mistral", "mixtral", "llama, one head of keys"), 1):
        losses, norms, weights = unsharded(name, 2)
        model = model_of(name)
        ulysses.set_attention(model, group)
        config = zero.Config(stage=stage, clip_norm=CLIP, timeout=20)
        engine = zero.initialize(model, sgd(model), config, mesh=mesh, data_dims=("dp", "cp"))
        told, seen = [], []
        for step in range(STEPS):
            inputs, labels = tokens.split_batch(batch_of(step, row), group)
            loss = tokens.cross_entropy(model(**inputs).logits, labels, group)
            train_on(engine, loss)
            told.append(loss.item())
            seen.append(float(engine.grad_norm or 0))
        found[f"{name}: losses"] = relative_error(told, [each[row] for each in losses])
        found[f"{name}: norms"] = relative_error(seen, norms)
        state = engine.state_dict()
        found[f"{name}: weights"] = state_error(state, weights) if state else 0.0
    return found


def by_plan(name: str, experts: bool, mesh: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A model on a mesh of two by two, by transformers' own plan, and what the engine is told of it.

    experts: divided over ranks with the same data, the others being tensor parallel.
    """
    dense = mesh_of(("pp", 1), ("fsdp", 2), ("tp", 2))
    expert = mesh_of(("pp", 1), ("efsdp", 2), ("ep", 2))
    plan = DistributedConfig(tp_size=2, ep_size=2 if experts else 1, tp_plan="auto")
    model: Any = model_of(name)
    model = type(model).maybe_distribute_model(model, plan, TransformersDeviceMesh(dense, expert))
    return model, {"data_dims": "dp"}


def by_experts(name: str, experts: bool, mesh: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Experts divided over ranks with different data."""
    model: Any = model_of(name)
    plan = {
        rule.replace("*", str(layer)): style
        for layer in range(model.config.num_hidden_layers)
        for rule, style in model.ep_plan.items()
    }
    alone = mesh_of(("all", 4), ("tp", 1))["tp"]
    apply_expert_parallelism(model, mesh["tp"], alone, plan)
    return model, {"data_dims": ("dp", "tp")}


PLANS: dict[str, tuple[str, Any, bool, dict[str, Any]]] = {
    "tensors": ("llama", by_plan, False, {}),
    "tensors of experts": ("mixtral", by_plan, False, {}),
    "tensors, and experts": ("mixtral", by_plan, True, {}),
    "experts": ("mixtral", by_experts, True, {"model.layers.*.mlp.experts": "tp"}),
}


def plans_body(context: Context, folder: str) -> dict[str, float]:
    """Losses, norms and weights; these also as one process has them of what was saved for transformers."""
    found = {}
    for title, (name, divide, experts, declared) in PLANS.items():
        for stage in (1, 2, 3):
            mesh = mesh_of(("dp", 2), ("tp", 2))
            model, given = divide(name, experts, mesh)
            config = zero.Config(stage=stage, clip_norm=CLIP, timeout=20, local_modules=declared)
            engine = zero.initialize(model, sgd(model), config, mesh=mesh, **given)
            losses, norms, weights = unsharded(name, engine.world_size)
            told, seen = [], []
            for step in range(STEPS):
                loss = loss_of(model, step, engine.rank)
                train_on(engine, loss)
                told.append(loss.item())
                seen.append(float(engine.grad_norm or 0))
            wanted = [each[engine.rank] for each in losses]
            found[f"{title}, stage {stage}: losses"] = relative_error(told, wanted)
            found[f"{title}, stage {stage}: norms"] = relative_error(seen, norms)
            with zero.gathered(model):
                state = {key: full(p.detach()) for key, p in model.named_parameters()}
            found[f"{title}, stage {stage}: weights"] = state_error(
                state, {key: weights[key] for key in state}
            )
            if stage == 3:
                engine.save_pretrained(f"{folder}/{title}")
                saved = AutoModelForCausalLM.from_pretrained(f"{folder}/{title}").state_dict()
                found[f"{title}: saved"] = state_error(saved, state)
    return found


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
