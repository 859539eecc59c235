"""Whether the settings of offload fit the model, the optimizer and the device. Changes nothing."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.optim import Optimizer

from accelz.flat_buffer import HOST
from zero.config import Config
from zero.errors import ConfigError
from zero.optimizer.checks import stepped_whole
from zero.optimizer.joint import members, name_of
from zero.optimizer.kernel_rules import rule_for
from zero.optimizer.state_size import values_per_element


def check_offload(model: nn.Module, optimizer: Optimizer, config: Config, device: torch.device) -> int:
    """Values of the master's size that a record has for each element, for `Planner`; 0 where nobody asks.

    Raises ConfigError for what cannot be done, and OptimizerError where state cannot be counted.
    """
    if rule_for(optimizer) is None:
        _check_own_steps(optimizer, config)
    if config.tiers.compact and not _has_split_masters(model, config):
        raise ConfigError(
            "Offload(compact=True) splits masters of trainable bf16 parameters, and the model has none: set "
            "precision='bf16', or leave compact=False"
        )
    if config.offload == "auto" and device.type == HOST.type:
        warnings.warn(
            "offload='auto' has nothing to move: on this device everything is in the host's memory already",
            stacklevel=3,
        )
    return 0 if config.tiers.budget("optimizer") is None else values_per_element(optimizer, config.dtype)


def _check_own_steps(optimizer: Optimizer, config: Config) -> None:
    """Where state would be stepped from a disk or ahead, and the optimizer cannot be."""
    how = "in a list" if len(members(optimizer)) > 1 else "with these options"
    serves = f"serves Adam, AdamW, SGD and Lion; {name_of(optimizer)} {how} steps its own"
    if config.tiers.optimizer == "disk":
        raise ConfigError(
            f"Offload(optimizer='disk') {serves} tensors, which have to be in memory: optimizer='host'"
        )
    if config.tiers.step == "device":
        raise ConfigError(f"Offload(step='device') {serves} tensors, all at once: step='host'")
    if config.tiers.budget("optimizer") is not None and stepped_whole(optimizer, config):
        raise ConfigError(
            f"Offload(host_budget=...): {name_of(optimizer)} steps whole parameters, of which ranks "
            "have unequal bytes: give a part with fraction=..., or leave the budget out"
        )
    if config.tiers.overlap:
        raise ConfigError(f"Offload(overlap=True) {serves} tensors, all at once: overlap=False")


def _has_split_masters(model: nn.Module, config: Config) -> bool:
    trainable = (p for p in model.parameters() if p.requires_grad and p.is_floating_point())
    return any((config.dtype or p.dtype) is torch.bfloat16 for p in trainable)
