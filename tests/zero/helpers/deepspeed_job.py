"""One rank of a job of DeepSpeed's: python -m tests.zero.helpers.deepspeed_job TASK FOLDER STAGE DTYPE.

save: it trains a little, saves `FOLDER`/checkpoint, and leaves in `FOLDER`/expected.pt what DeepSpeed's own
zero_to_fp32 makes of that. load: it loads the universal checkpoint `FOLDER`/universal, and leaves all masters
and moments in `FOLDER`/found.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found,unused-ignore]
import torch
import torch.distributed as dist
from deepspeed.utils import (  # type: ignore[import-not-found,unused-ignore]
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)
from deepspeed.utils.zero_to_fp32 import (  # type: ignore[import-not-found,unused-ignore]
    get_fp32_state_dict_from_zero_checkpoint,
)
from torch import Tensor, nn


class Model(nn.Module):
    """Sizes that two ranks do not divide; a tied, a frozen and a buffer tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, 13)
        self.up = nn.Linear(13, 37)
        self.down = nn.Linear(37, 13)
        self.old = nn.Linear(13, 13, bias=False).requires_grad_(False)
        self.head = nn.Linear(13, 29, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.linspace(-1, 1, 13))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embedding(inputs)
        hidden = hidden + self.shift.to(hidden.dtype)
        hidden = self.down(torch.tanh(self.up(hidden))) + self.old(hidden)
        loss: Tensor = self.head(hidden).float().logsumexp(-1).mean()
        return loss


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """An optimizer's param_groups: matrices and vectors."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def config(stage: int, dtype: str) -> dict[str, Any]:
    """sub_group_size: so small that stage 3 has several."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "sub_group_size": 300},
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 30,
    }


def build(stage: int, dtype: str, universal: bool) -> Any:
    """DeepSpeed's engine of the model."""
    torch.manual_seed(5)
    model = Model()
    settings = config(stage, dtype) | {"checkpoint": {"load_universal": universal}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups_of(model), config=settings)
    return engine


def save(folder: Path, stage: int, dtype: str) -> None:
    torch.manual_seed(5)
    old = Model().old.weight.detach().to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    engine = build(stage, dtype, universal=False)
    for step in range(3):
        engine.backward(engine(torch.arange(step, step + 8).view(2, 4) + dist.get_rank()))
        engine.step()
    engine.save_checkpoint(str(folder / "checkpoint"))
    dist.barrier()
    if dist.get_rank() == 0:
        state = get_fp32_state_dict_from_zero_checkpoint(str(folder / "checkpoint"))
        state |= {"old.weight": old}  # which DeepSpeed leaves out in bf16 at stage 1
        torch.save({name: value.detach().float() for name, value in state.items()}, folder / "expected.pt")


def load(folder: Path, stage: int, dtype: str) -> None:
    engine = build(stage, dtype, universal=True)
    engine.load_checkpoint(str(folder / "universal"))
    if stage < 3:
        engine.optimizer._lazy_init_hp_params_optimizer_state()  # otherwise the first step does it
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            state = {key: safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
            found[name] = state | {"fp32": safe_get_full_fp32_param(parameter)}
    if dist.get_rank() == 0:
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    dist.barrier()
    dist.destroy_process_group()
