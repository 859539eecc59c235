"""Check that the offload settings fit the model, the optimizer and the device. Changes nothing."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from accelz import HOST
from zero.config.training import Config, dtype_named
from zero.errors import ConfigError
from zero.optimizer.joint import members, name_of
from zero.optimizer.kernel_rules import SERVED, rule_for
from zero.tiers.tier import wanted
from zero.warning import warn


def check_offload(model: nn.Module, optimizer: Optimizer, config: Config) -> None:
    """Raise ConfigError for offload that is not possible."""
    for each in members(optimizer):
        if rule_for(each) is None:
            _check_self_stepping(each, config)
    if config.offload.compact and not _has_split_masters(model, config):
        raise ConfigError(
            "Offload(compact=True) splits masters of trainable bf16 parameters, but the model has none: set "
            "precision='bf16', or keep compact=False"
        )


def warn_of_nothing_to_move(config: Config, device: torch.device, rank: int) -> None:
    """Warn about automatic offload on a device that is the host. rank: this rank's number in the job."""
    if config.offload.measured and device.type == HOST.type:
        warn(
            "offload='auto' has nothing to move: on this device everything is already in host memory",
            rank=rank,
        )


def _check_self_stepping(optimizer: Optimizer, config: Config) -> None:
    """Raise ConfigError if an optimizer that steps itself is to step from disk or on a visit."""
    serves = (
        f"serves optimizers that kernels step: {', '.join(kind.__name__ for kind in SERVED)}. This "
        f"{name_of(optimizer)} steps its own"
    )
    if wanted(config.offload, "optimizer").stored:
        raise ConfigError(
            f"Offload(optimizer='disk') {serves} tensors, which must be in memory: set optimizer='host'"
        )
    if config.offload.streams:
        raise ConfigError(f"Offload(step='device') {serves} tensors, all at once: set step='host'")


def _has_split_masters(model: nn.Module, config: Config) -> bool:
    trainable = (p for p in model.parameters() if p.requires_grad and p.is_floating_point())
    return any((dtype_named(config.precision) or p.dtype) is torch.bfloat16 for p in trainable)
