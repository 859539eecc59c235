"""Dropout on a mesh: what each rank draws is its own affair, and the engine draws nothing."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.meshes import mesh_of
from tests.zero.helpers.optimizers import sgd
from tests.zero.helpers.training import relative_error

WIDTH, STEPS, SEED = 8, 4, 40

pytestmark = pytest.mark.host  # meshes of gloo's


class Block(nn.Module):
    """Dropout where every tensor parallel rank has all: after the sum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(torch.tanh(self.up(x))), 0.4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:  # recomputed in the backward, with what was drawn
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def divided(mesh: DeviceMesh) -> Model:
    model = Model()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def rows(step: int, row: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + row))


def unsharded() -> list[list[float]]:
    """Losses by step and row; each row has its own generator."""
    model = Model()
    optimizer, found = sgd(model), []
    states = [torch.Generator().manual_seed(SEED + row).get_state() for row in range(2)]
    for step in range(STEPS):
        losses = []
        for row in range(2):
            torch.set_rng_state(states[row])
            loss = model(rows(step, row))
            states[row] = torch.get_rng_state()
            (loss / 2).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses)
    return found


def body(context: Context, folder: str) -> dict[str, float]:
    """Seeded by the coordinate of the data; and the same again from a checkpoint of the middle."""
    mesh, wanted, found = mesh_of(("dp", 2), ("tp", 2)), unsharded(), {}
    row = mesh.get_local_rank("dp")
    for stage in (1, 3):
        model = divided(mesh["tp"])
        config = zero.Config(timeout=20, stage=stage)
        torch.manual_seed(SEED + row)
        before = torch.get_rng_state()
        engine = zero.initialize(model, sgd(model), config, mesh=mesh, data_dims="dp")
        assert torch.equal(torch.get_rng_state(), before)
        told = []
        for step in [*range(STEPS), *range(STEPS // 2, STEPS)]:
            if len(told) == STEPS:
                engine.load_checkpoint(f"{folder}/{stage}")
            elif step == STEPS // 2:
                engine.save_checkpoint(f"{folder}/{stage}")
            loss = model(rows(step, row))
            train_on(engine, loss)
            told.append(loss.item())
        losses = [each[row] for each in wanted]
        found[f"stage {stage}"] = relative_error(told[:STEPS], losses)
        found[f"stage {stage}, again"] = float(told[STEPS:] != told[STEPS // 2 : STEPS])
    return found


def test_ranks_seeded_by_their_data_draw_as_one_process(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(4).run(body, folder=str(tmp_path)):
        assert max(found.values()) < 1e-6, found


def blocks_body(context: Context) -> list[bool]:
    """What is dropped of this rank's block of a divided activation, where ranks are seeded alike."""
    mesh = mesh_of(("tp", 2))
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about this very thing
        found = F.dropout(distribute_tensor(torch.ones(64), mesh, [Shard(0)]), 0.5)
    assert isinstance(found, DTensor)
    return [bool(each) for each in found.to_local()]


def test_on_the_host_torch_draws_the_same_for_each_block(cluster: Clusters) -> None:
    first, second = cluster(2).run(blocks_body)
    assert first == second
    assert 0 < sum(first) < len(first)
