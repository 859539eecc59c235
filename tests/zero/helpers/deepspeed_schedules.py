"""Rates of DeepSpeed's schedules: python -m tests.zero.helpers.deepspeed_schedules writes what
DeepSpeed's own do, in some of the steps, to `RECORDED`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

RECORDED = Path(__file__).parent.parent / "integrations" / "deepspeed_rates.json"
STEPS = 1000
SAMPLED = sorted(
    {*range(6), *range(98, 104), *range(298, 304), *range(898, 904), *range(7, STEPS + 1, 71), STEPS}
)
CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 100}),
    ("WarmupLR", {"warmup_min_lr": [1e-5, 2e-5], "warmup_max_lr": 1e-3, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_num_steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 900, "warmup_num_steps": 100}),
    ("WarmupDecayLR", {"total_num_steps": 1000, "warmup_max_lr": [1e-2, 1e-3], "warmup_num_steps": 300,
        "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 900, "warmup_num_steps": 100, "warmup_min_ratio": 0.1}),
    ("WarmupCosineLR", {"total_num_steps": 1000, "warmup_num_steps": 300, "cos_min_ratio": 0.05,
        "warmup_type": "linear"}),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 100, "cycle_second_step_size": 200, "decay_lr_rate": 0.5,
        "decay_step_size": 70, "decay_mom_rate": 0.001}),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 300, "cycle_first_stair_count": 7}),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 100, "cycle_second_stair_count": 3,
        "cycle_momentum": False}),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 30,
        "lr_range_test_step_rate": 2.0}),
    ("LRRangeTest", {"lr_range_test_min_lr": [1e-4, 1e-3], "lr_range_test_step_size": 30,
        "lr_range_test_staircase": True}),
]  # fmt: skip


def optimizer() -> torch.optim.Optimizer:
    """Two param_groups with rates of their own."""
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    return torch.optim.AdamW([{"params": [first]}, {"params": [second], "lr": 1e-2}], lr=3e-3)


def hyper_parameters(schedules: Any, name: str, parameters: dict[str, Any]) -> list[list[float]]:
    """By step: the rate, and the two betas, of each group. schedules: what has the schedule of this name."""
    stepped = optimizer()
    scheduler = getattr(schedules, name)(stepped, **parameters)
    found = []
    for _ in range(STEPS + 1):
        found.append([value for group in stepped.param_groups for value in (group["lr"], *group["betas"])])
        stepped.step()  # torch's schedulers look at the order
        scheduler.step()
    return found


def main() -> None:
    import deepspeed.runtime.lr_schedules as theirs  # type: ignore[import-not-found,unused-ignore]

    recorded = []
    for name, parameters in CASES:
        every = hyper_parameters(theirs, name, parameters)
        recorded.append([[float(f"{value:.12g}") for value in every[step]] for step in SAMPLED])
    RECORDED.write_text(json.dumps(recorded, separators=(",", ":")).replace("]],", "]],\n") + "\n")


if __name__ == "__main__":
    main()
