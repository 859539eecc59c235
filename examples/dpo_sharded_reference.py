"""DPO with TRL, policy and reference sharded: torchrun --nproc-per-node 2 dpo_sharded_reference.py

The reference has an engine without an optimizer: it takes its shards and nothing else. Needs trl.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import tokenizers
import torch
import transformers
import trl

import zero
from zero.integrations.transformers import TrainerMixin

SETTINGS = zero.Config(stage=3)


class DPO(TrainerMixin, trl.DPOTrainer):
    """TRL's trainer, sharded."""


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", "is", "it", "good", "bad", "yes", "no"]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def language_model() -> transformers.LlamaForCausalLM:
    """Small, of random weights. `AutoModelForCausalLM.from_pretrained(...)` goes here."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/dpo"))
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()

    reference = language_model().requires_grad_(False)
    reference_engine = zero.initialize(reference, config=SETTINGS)  # keep it as long as you train
    pairs = [
        {"prompt": "is it good", "chosen": " yes", "rejected": " no"},
        {"prompt": "is it bad", "chosen": " yes it is", "rejected": " no"},
    ]
    trainer = DPO(
        language_model(),
        reference,
        trl.DPOConfig(
            output_dir=str(given.out),
            max_steps=given.steps,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            bf16=torch.accelerator.is_available(),
            use_cpu=not torch.accelerator.is_available(),
            report_to=[],
        ),
        train_dataset=datasets.Dataset.from_list(pairs * 16),
        processing_class=tokenizer(),
        zero_config=SETTINGS,
    )
    trainer.train()
    trainer.save_model(str(given.out / "weights"))
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    if reference_engine.rank == 0:
        print(f"loss {log[0]['loss']:.4f} to {log[-1]['loss']:.4f}")


main()
