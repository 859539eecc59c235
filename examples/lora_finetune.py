"""LoRA on a sharded, frozen base, in a loop of one's own: torchrun --nproc-per-node 2 lora_finetune.py

The base is a folder that `save_pretrained` wrote (--model), or a small Llama of random weights. Run it again
with larger --steps to go on from the last checkpoint, on any number of ranks. Needs transformers and peft.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import peft
import torch
import transformers

import zero


def base(folder: str | None) -> transformers.PreTrainedModel:
    if folder:
        return transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def batch(step: int, rank: int, vocabulary: int) -> torch.Tensor:
    """(8, 16) tokens: counting upwards from a random one. Your data goes here."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randint(0, vocabulary, (8, 1), generator=generator) + torch.arange(16)) % vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"))
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()

    torch.manual_seed(0)
    adapter = peft.LoraConfig(
        r=8, target_modules=["q_proj", "v_proj", "up_proj"], modules_to_save=["lm_head"]
    )
    model = peft.get_peft_model(base(given.model), adapter)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    engine = zero.initialize(model, optimizer, zero.Config(stage=3))

    checkpoints, first = given.out / "checkpoints", 0
    if (checkpoints / "latest").exists():
        first = engine.load_checkpoint(checkpoints).state["step"]
    for step in range(first, given.steps):
        tokens = batch(step, engine.rank, model.config.vocab_size).to(engine.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if engine.rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    engine.save_pretrained(given.out / "adapter")  # on every rank; the base is not gathered
    state = {"step": given.steps}
    engine.save_checkpoint(checkpoints / f"step-{given.steps}", state, trainable_only=True, keep_last=1)


main()
