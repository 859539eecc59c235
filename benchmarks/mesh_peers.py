"""The peers of a mesh of data by tensor: blocks divided over two ranks, and sharded over the rest.

Matrices are divided by torch's `parallelize_module`, alike for all: by columns before the attention and the
activation, by rows after them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import accelz
from benchmarks.model import Decoder
from benchmarks.peers import Peer, Setting, ZeroPeer, build_fsdp2, join

TENSOR = 2  # ranks that divide a block
COLUMNS = ("attention.query", "attention.key", "attention.value", "gate", "up")
ROWS = ("attention.output", "down")


def build_fsdp2_tp(model: Decoder, setting: Setting) -> Peer:
    """FSDP2 over the data, beside tensor parallelism."""
    return build_fsdp2(model, setting, mesh=lambda device: _divided(model, setting)["dp"])


def build_zero_tp(model: Decoder, setting: Setting) -> Peer:
    """zero at stage 3 over the data, beside tensor parallelism."""
    join(setting)
    return ZeroPeer(model, setting, mesh=_divided(model, setting), stage=3)


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


def data_rank(peer: str, rank: int) -> int:
    """The number of a rank's data: those that divide a block have the same."""
    return rank // TENSOR if peer in PEERS else rank


PEERS: dict[str, Callable[[Decoder, Setting], Peer]] = {
    "fsdp2-tp2": build_fsdp2_tp,
    "zero3-tp2": build_zero_tp,
}
