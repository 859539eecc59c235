"""The peers of a mesh of data by tensor or by experts, over two ranks, and sharded over the rest.

Matrices are divided by torch's `parallelize_module`, alike for all: by columns before the attention and the
activation, by rows after them. Experts are those of `mixture`, another model than other peers': compare its
peers with each other. All ranks of their mesh have different data.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import accelz
from benchmarks.mixture import to_mixture
from benchmarks.model import Decoder
from benchmarks.peers import Peer, Setting, TorchPeer, ZeroPeer, build_fsdp2, join, optimizers_of, policy

TENSOR = 2  # ranks that divide a block, or have experts of their own
COLUMNS = ("attention.query", "attention.key", "attention.value", "gate", "up")
ROWS = ("attention.output", "down")


def build_fsdp2_tp(model: Decoder, setting: Setting) -> Peer:
    """FSDP2 over the data, beside tensor parallelism."""
    return build_fsdp2(model, setting, mesh=lambda device: _divided(model, setting)["dp"])


def build_zero_tp(model: Decoder, setting: Setting) -> Peer:
    """zero at stage 3 over the data, beside tensor parallelism."""
    join(setting)
    return ZeroPeer(model, setting, mesh=_divided(model, setting), dims="dp", stage=3)


def _divided(model: Decoder, setting: Setting) -> DeviceMesh:
    """Divide the model's blocks, on the device; return the mesh."""
    device = accelz.current().device
    shape = (setting.ranks // TENSOR, TENSOR)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
    plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    model.to(device)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
        block.attention.heads //= TENSOR
    return mesh


def build_fsdp2_ep(model: Decoder, setting: Setting) -> Peer:
    """FSDP2: experts over the ranks that have the same ones, all else over all ranks."""
    join(setting)
    mesh = _mixed(model, setting)
    precision = policy(setting)
    for block in model.blocks:
        experts = fully_shard(block.experts, mesh=mesh["dp"], **precision)  # type: ignore[arg-type,operator]
        experts.set_gradient_divide_factor(setting.ranks)
        experts.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing
    whole = mesh["dp", "ep"]._flatten("all")
    for module in (*model.blocks, model):
        fully_shard(module, mesh=whole, **precision)
    assert isinstance(model, FSDPModule)
    return TorchPeer(model, optimizers_of(model, setting))


def build_zero_ep(model: Decoder, setting: Setting) -> Peer:
    """zero at stage 3 with experts of each rank's own."""
    join(setting)
    mesh = _mixed(model, setting)
    local = {"blocks.*.experts": "ep"}
    return ZeroPeer(model, setting, mesh=mesh, dims=("dp", "ep"), stage=3, local_modules=local)


def _mixed(model: Decoder, setting: Setting) -> DeviceMesh:
    """Give the model its experts, on the device; return the mesh."""
    device = accelz.current().device
    shape = (setting.ranks // TENSOR, TENSOR)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "ep"))
    to_mixture(model, mesh.get_group("ep"))
    model.to(device)
    return mesh


def data_rank(peer: str, rank: int) -> int:
    """The number of a rank's data: those that divide a block have the same."""
    return rank // TENSOR if peer in DIVIDED else rank


DIVIDED: dict[str, Callable[[Decoder, Setting], Peer]] = {
    "fsdp2-tp2": build_fsdp2_tp,
    "zero3-tp2": build_zero_tp,
}
PEERS = DIVIDED | {"fsdp2-ep2": build_fsdp2_ep, "zero3-ep2": build_zero_ep}
