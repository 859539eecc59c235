"""The peers of training on several hosts, each of which has its own copy of the model (HSDP).

They need at least two hosts with two ranks on each.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.model import Decoder
from benchmarks.peers import Peer, Setting, ZeroPeer, build_fsdp2


def build_fsdp2_hsdp(model: Decoder, setting: Setting) -> Peer:
    """FSDP2, sharded within a host and replicated between hosts."""

    def mesh(device: str) -> DeviceMesh:
        shape = (setting.hosts, setting.ranks // setting.hosts)
        return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))

    return build_fsdp2(model, setting, mesh=mesh)


def build_zero_hsdp(model: Decoder, setting: Setting) -> Peer:
    """zero at stage 3, sharded within a host."""
    return ZeroPeer(model, setting, stage=3, shard_ranks=setting.ranks // setting.hosts)


PEERS: dict[str, Callable[[Decoder, Setting], Peer]] = {
    "fsdp2-hsdp": build_fsdp2_hsdp,
    "zero3-hsdp": build_zero_hsdp,
}
