"""All whole values of an engine as numbers to compare."""

from __future__ import annotations

from zlib import crc32

import torch

import zero

Fingerprint = dict[str, int]


def fingerprint(engine: zero.Engine, optimizer: bool = True) -> Fingerprint:
    """A number for every whole master and state tensor. Collective."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[name] = _digest(engine.full_master(name))
        if optimizer and parameter.requires_grad:
            for key, value in engine.full_optimizer_state(name).items():
                found[f"{name}/{key}"] = _digest(value)
    for name, buffer in engine.module.named_buffers():
        found[name] = _digest(buffer)
    return found


def _digest(value: torch.Tensor) -> int:
    flat = value.detach().cpu().contiguous().view(-1)
    return crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0
