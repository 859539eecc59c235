"""Bodies that train with TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import distributed as dist
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.generation.vllm_generation import VLLMGeneration

import zero
from accelz.conformance.cluster import Context
from tests.frameworks.jobs import VOCABULARY, begin_job, language_model, on_host, token_rows
from tests.frameworks.trainer_runs import history, weights
from zero.integrations.transformers import TrainerMixin
from zero.sharding.guard import ShardedParameter


class SFT(TrainerMixin, SFTTrainer):
    """As in the guide."""


class DPO(TrainerMixin, DPOTrainer):
    """With a reference model or without."""


class Reward(TrainerMixin, RewardTrainer):
    """Of a model with one output."""


class GRPO(TrainerMixin, GRPOTrainer):
    """Which generates as it trains."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of the words w3, w4 and so on."""
    special = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    words = special | {f"w{number}": number for number in range(3, VOCABULARY)}
    model = Tokenizer(WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def texts(number: int) -> Dataset:
    """Of unequal lengths."""
    found = token_rows(number).tolist()
    return Dataset.from_list(
        [{"text": " ".join(f"w{token}" for token in row[: 4 + i % 7])} for i, row in enumerate(found)]
    )


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def usual(directory: str) -> dict[str, Any]:
    return {
        "output_dir": directory,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "learning_rate": 5e-4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "save_strategy": "epoch",
        "seed": 5,
    }


def trainer_of(ours: type, theirs: type, stage: int | None, parts: dict[str, Any]) -> Any:
    """Ours with an engine, or theirs with DistributedDataParallel."""
    if stage is None:
        return theirs(**parts)
    return ours(**parts, zero_config=zero.Config(stage=stage, timeout=60.0))


def fine_tuned(
    context: Context, stage: int | None, directory: str, settings: dict[str, Any], adapter: bool
) -> dict[str, Any]:
    begin_job(context)
    arguments = SFTConfig(**usual(directory) | settings, max_length=16)
    parts: dict[str, Any] = {
        "model": language_model(),
        "args": arguments,
        "train_dataset": texts(26),
        "processing_class": tokenizer(),
    }
    if adapter:
        parts["peft_config"] = lora()
    trainer = trainer_of(SFT, SFTTrainer, stage, parts)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    file = "adapter_model.safetensors" if adapter else "model.safetensors"
    saved = on_host(load_file(Path(directory) / file))
    return {"log": history(trainer), "weights": weights(trainer), "saved": saved}


def preferences(number: int) -> Dataset:
    """A prompt, an answer that is preferred, and one that is not."""
    words = [f"w{token}" for token in token_rows(number).flatten().tolist()]
    rows = [words[12 * i : 12 * i + 12] for i in range(number)]
    keys = ("prompt", "chosen", "rejected")
    return Dataset.from_list(
        [
            {key: " ".join(row[4 * part : 3 + 4 * part + i % 2]) for part, key in enumerate(keys)}
            for i, row in enumerate(rows)
        ]
    )


def stored(directory: str, context: Context) -> str:
    """A folder from which TRL loads the model, and the reference that it makes by itself."""
    folder = f"{directory}/model"
    if context.rank == 0:
        language_model().save_pretrained(folder)
    dist.barrier()
    return folder


def preferred(context: Context, stage: int | None, directory: str, reference: str) -> dict[str, Any]:
    """reference: "given"; "sharded" by the user; "synced" for one that follows the model; "own" for none, so
    that TRL loads one; "adapter" for the model itself without its adapter."""
    begin_job(context)
    synced = reference == "synced"
    parts: dict[str, Any] = {
        "model": stored(directory, context) if reference == "own" else language_model(),
        "args": DPOConfig(**usual(directory), max_length=24, sync_ref_model=synced, ref_model_sync_steps=2),
        "train_dataset": preferences(14),
        "processing_class": tokenizer(),
    }
    engine = None
    if reference == "adapter":
        parts["peft_config"] = lora()
    elif reference != "own":
        parts["ref_model"] = language_model(seed=2).requires_grad_(False)
    if reference == "sharded" and stage is not None:
        engine = zero.initialize(parts["ref_model"], config=zero.Config(stage=stage, timeout=60.0))
    trainer = trainer_of(DPO, DPOTrainer, stage, parts)
    trainer.train()
    held = trainer.ref_model
    found = {
        "log": history(trainer),
        "weights": weights(trainer),
        "sharded": held is not None and isinstance(next(held.parameters()), ShardedParameter),
    }
    del engine  # which has lived as long as the reference was used
    return found


def length_reward(completions: list[str], **kwargs: Any) -> list[float]:
    """The shorter the better, and some words are better than others."""
    return [sum(map(ord, each)) % 7 - len(each) / 10 for each in completions]


class Receiving(VLLMGeneration):
    """Sends weights to itself in place of a server of vLLM."""

    def _init_vllm(self) -> None:
        self.vllm_client = self
        self.got: dict[str, torch.Tensor] = {}

    def update_named_params(self, metadata: list[Any], named: Any) -> None:
        self.got = {name: values.clone() for name, values in named}
        assert [(name, list(values.shape)) for name, values in self.got.items()] == [
            (name, shape) for name, _, shape in metadata
        ]

    def reset_prefix_cache(self) -> None:
        """As the client has it."""


def reinforced(context: Context, stage: int | None, directory: str, reference: str) -> dict[str, Any]:
    """Train, and send the weights to vLLM. reference: "none"; "synced" for one that TRL loads, which follows
    the model; "adapter" for the model itself without its adapter."""
    begin_job(context)
    settings = {"num_generations": 2, "max_completion_length": 8, "num_train_epochs": 1}
    settings |= {"beta": 0.0 if reference == "none" else 0.1}
    settings |= {"sync_ref_model": reference == "synced", "ref_model_sync_steps": 1}
    parts: dict[str, Any] = {
        "model": stored(directory, context) if reference == "synced" else language_model(),
        "args": GRPOConfig(**usual(directory) | settings),
        "train_dataset": preferences(8).select_columns(["prompt"]),
        "processing_class": tokenizer(),
        "reward_funcs": length_reward,
    }
    if reference == "adapter":
        parts["peft_config"] = lora()
    trainer = trainer_of(GRPO, GRPOTrainer, stage, parts)
    trainer.train()
    before = weights(trainer)
    sending = Receiving(trainer.model, trainer.accelerator, tokenizer(), mode="server")
    sending.sync_weights()
    return {
        "log": history(trainer),
        "weights": before,
        "sent": on_host(sending.got),
        "after": weights(trainer),
    }


def judged(context: Context, stage: int | None, directory: str) -> dict[str, Any]:
    begin_job(context)
    language = language_model()
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(
        LlamaConfig(**language.config.to_dict() | {"num_labels": 1, "pad_token_id": 0})
    )
    parts: dict[str, Any] = {
        "model": model,
        "args": RewardConfig(**usual(directory), max_length=24),
        "train_dataset": preferences(14).remove_columns(["prompt"]),
        "processing_class": tokenizer(),
    }
    trainer = trainer_of(Reward, RewardTrainer, stage, parts)
    trainer.train()
    return {"log": history(trainer), "weights": weights(trainer)}
