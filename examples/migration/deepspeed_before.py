"""DeepSpeed, before: torchrun --standalone --nproc-per-node 2 deepspeed_before.py FOLDER"""

from __future__ import annotations

import sys

import deepspeed
import torch

from task import Model, dataset

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 16, "warmup_num_steps": 4, "warmup_max_lr": 1e-2},
    },
}


def main() -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Model()
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=dataset(), config=CONFIG
    )
    for epoch in range(3):
        for (tokens,) in loader:
            loss = engine(tokens.to(engine.device))
            engine.backward(loss)
            engine.step()
            if engine.global_rank == 0:
                print(f"loss {loss.item():.6f}, rate {engine.get_lr()[0]:.6f}")
        engine.save_checkpoint(sys.argv[1], tag=f"epoch-{epoch}", client_state={"epoch": epoch})


main()
