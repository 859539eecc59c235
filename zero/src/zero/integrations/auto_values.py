"""A DeepSpeed configuration for Trainer: what it leaves open as "auto" is in TrainingArguments."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero.config.deepspeed import from_deepspeed
from zero.config.settings_file import read_settings
from zero.config.training import Config
from zero.errors import ConfigError

_SCHEDULERS = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""What a scheduler of DeepSpeed's is called in TrainingArguments."""


def config_of(source: Mapping[str, Any] | str | Path, args: Any, ranks: int) -> Config:
    """Return the settings of an engine for a DeepSpeed configuration, a dict or the path of a JSON file.

    args: TrainingArguments. What both say must be the same. Accumulation, clipping and the scale of fp16's
    loss are left to Trainer, which makes the optimizer and the scheduler, too. Raises ConfigError for what
    differs, and as `from_deepspeed` does.
    """
    given = copy.deepcopy(dict(read_settings(source)))
    differing = _fill(given, _said(args, ranks))
    differing += _without(given, "optimizer", ("Adam", "AdamW"))
    scheduler = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    differing += _without(given, "scheduler", [k for k, name in _SCHEDULERS.items() if name == scheduler])
    stage3 = given.get("zero_optimization", {})
    if stage3.get("stage3_param_persistence_threshold") == "auto":
        del stage3["stage3_param_persistence_threshold"]
    if differing:
        raise ConfigError(
            f"the DeepSpeed configuration and TrainingArguments differ: {'; '.join(differing)}. Write 'auto' "
            "there, and the value in TrainingArguments"
        )
    mine: dict[str, Any] = {"gradient_accumulation_steps": None, "clip_norm": None}
    if args.fp16:
        mine |= {"precision": "model", "loss_scale": None}
    return from_deepspeed(given, ranks).model_copy(update=mine)


def _said(args: Any, ranks: int) -> dict[tuple[str, ...], Any]:
    """What TrainingArguments say, by path in a configuration."""
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return {
        ("train_micro_batch_size_per_gpu",): micro,
        ("gradient_accumulation_steps",): steps,
        ("train_batch_size",): micro * steps * ranks,
        ("gradient_clipping",): args.max_grad_norm,
        ("bf16", "enabled"): args.bf16,
        ("fp16", "enabled"): args.fp16,
    }


def _fill(given: dict[str, Any], said: Mapping[tuple[str, ...], Any]) -> list[str]:
    """Put values in place of "auto"; return what differs."""
    differing = []
    for path, value in said.items():
        section = given.get(path[0], {}) if len(path) > 1 else given
        found = section.get(path[-1], value)
        if found == "auto":
            section[path[-1]] = value
        elif found != value:
            differing.append(f"{'.'.join(path)!r} is {found!r}, not {value!r}")
    return differing


def _without(given: dict[str, Any], name: str, kinds: Any) -> list[str]:
    """Remove a part that TrainingArguments make; return what they would make otherwise."""
    part = given.pop(name, {})
    kind, params = part.get("type"), part.get("params", {})
    said = [f"'{name}.params.{key}' is {value!r}" for key, value in params.items() if value != "auto"]
    return [*said, *([f"'{name}.type' is {kind!r}"] if part and kind not in kinds else [])]
