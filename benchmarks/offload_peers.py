"""The peers of training with state on the host: zero's tiers beside FSDP2's CPUOffloadPolicy and
DeepSpeed's offload."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch.distributed.fsdp import CPUOffloadPolicy

import accelz
import zero
from benchmarks.model import Decoder
from benchmarks.peers import DEEPSPEED_HOST, DeepSpeedPeer, Peer, Setting, ZeroPeer, build_fsdp2


def build_fsdp2_host(model: Decoder, setting: Setting) -> Peer:
    """FSDP2 with parameters, gradients and optimizer state on the host: it offloads all of them or none."""
    own_memory = accelz.current().device.type != "cpu"  # only these need page-locked memory
    return build_fsdp2(model, setting, offload_policy=CPUOffloadPolicy(pin_memory=own_memory))


def build_zero_host(model: Decoder, setting: Setting, offload: zero.Offload | Literal["auto"]) -> Peer:
    """zero at stage 3 with some of its state on the host."""
    return ZeroPeer(model, setting, stage=3, offload=offload)


def build_deepspeed_host(model: Decoder, setting: Setting) -> Peer:
    """DeepSpeed's ZeRO-3 with parameters and optimizer state on the host, stepped by its own CPU Adam."""
    return DeepSpeedPeer(model, setting, host=True)


PEERS: dict[str, Callable[[Decoder, Setting], Peer]] = {
    "fsdp2-host": build_fsdp2_host,
    "zero3-host": partial(build_zero_host, offload=zero.Offload(optimizer="host")),
    "zero3-host-params": partial(build_zero_host, offload=zero.Offload(optimizer="host", params="host")),
    "zero3-streamed": partial(
        build_zero_host, offload=zero.Offload(optimizer="host", params="host", step="device")
    ),
    "zero3-auto": partial(build_zero_host, offload="auto"),
    DEEPSPEED_HOST: build_deepspeed_host,
}
