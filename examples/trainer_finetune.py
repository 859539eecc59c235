"""Transformers' Trainer, sharded: torchrun --nproc-per-node 2 trainer_finetune.py

Two lines differ from a program without zero: the import of Trainer, and zero_config=. Run it again with more
--epochs to go on from the last checkpoint. Needs transformers and accelerate.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

import zero
from zero.integrations.transformers import Trainer


def rows(number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Tokens that count upwards from a random one. Your data set goes here."""
    generator = torch.Generator().manual_seed(seed)
    tokens = (torch.randint(0, 64, (number, 1), generator=generator) + torch.arange(16)) % 64
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/trainer"))
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()

    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(given.out),
        num_train_epochs=given.epochs,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=4,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        use_cpu=not torch.accelerator.is_available(),
    )
    trainer = Trainer(
        transformers.LlamaForCausalLM(config),
        arguments,
        train_dataset=rows(128, seed=1),
        eval_dataset=rows(32, seed=2),
        zero_config=zero.Config(stage=3),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(given.out) if given.out.exists() else None)
    trainer.save_model(str(given.out / "weights"))  # whole, as from_pretrained reads them
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"validation loss {metrics['eval_loss']:.4f}")


main()
