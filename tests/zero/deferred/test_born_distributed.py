"""`zero.init()` with DTensors: each rank gets its block of what the constructor gives, when it is sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.meshes import mesh_of
from tests.zero.helpers.optimizers import sgd
from zero.sharding.distributed import local_of

WIDTH, WORDS = 72, 101

pytestmark = pytest.mark.host  # meshes of gloo's


class Model(nn.Module):
    """Values of random operations, of several in a row, and of other parameters; one in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.grouped = nn.Parameter(torch.empty(4, WIDTH, WIDTH))
        self.whole = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        nn.init.normal_(self.grouped, std=0.02)
        with torch.no_grad():
            self.down.weight.mul_(self.whole.abs().mean())
            self.up.bias.zero_()


def built(mesh: DeviceMesh) -> Model:
    """Divided by rows, by columns and unevenly; a block of the values of this rank, without communication."""
    torch.manual_seed(2)
    model = Model()
    words = {"embedding": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel()}
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), **words}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    model.head.weight = model.embedding.weight
    for name, placement in (("grouped", Shard(0)), ("whole", Replicate())):
        divided = distribute_tensor(getattr(model, name), mesh, [placement], src_data_rank=None)
        setattr(model, name, nn.Parameter(divided))
    return model


def body(context: Context, stage: int) -> None:
    mesh = mesh_of(("dp", 2), ("tp", 2))
    expected = built(mesh["tp"])
    drawn = torch.get_rng_state()
    with zero.init():
        model = built(mesh["tp"])
    assert torch.equal(torch.get_rng_state(), drawn)
    large: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.numel() > 4096}
    assert list(large) == ["grouped", "whole", "embedding.weight", "up.weight", "down.weight"]
    for name, parameter in large.items():
        assert isinstance(parameter, DTensor), name
        assert local_of(parameter).untyped_storage().nbytes() == 0, name
        for use in (lambda p=parameter: p + 1, lambda p=parameter: p.to_local() + 1, parameter.full_tensor):
            with pytest.raises(zero.ShardedParameterError, match=r"was made under zero\.init"):
                use()
    config = zero.Config(timeout=20, stage=stage)
    zero.initialize(model, sgd(model), config, mesh=mesh, data_dims="dp")
    assert model.head.weight is model.embedding.weight
    with zero.gathered(model):
        pairs: Any = zip(model.named_parameters(), expected.parameters(), strict=True)
        for (name, found), wanted in pairs:
            assert type(found) is type(wanted), name
            assert (found.placements, found.shape) == (wanted.placements, wanted.shape), name
            assert torch.equal(local_of(found), local_of(wanted)), name


def pretrained_body(context: Context, path: str) -> None:
    mesh = mesh_of(("dp", 2), ("tp", 2))
    torch.manual_seed(3)
    whole = {name: value.clone() for name, value in Model().state_dict().items()}
    if context.rank == 0:
        save_file({name: value for name, value in whole.items() if name != "head.weight"}, path)
    torch.distributed.barrier()
    with zero.init():
        model = built(mesh["tp"])
    zero.load_pretrained(model, path)
    assert local_of(model.grouped).untyped_storage().nbytes() == 0
    zero.initialize(model, sgd(model), zero.Config(timeout=20), mesh=mesh, data_dims="dp")
    with zero.gathered(model):
        for name, parameter in model.named_parameters():
            found: Any = parameter
            assert torch.equal(found.full_tensor(), whole[name]), name


@pytest.mark.parametrize("stage", [1, 3])
def test_blocks_are_those_of_the_plain_constructors_values(cluster: Clusters, stage: int) -> None:
    cluster(4).run(body, stage=stage)


def test_pretrained_values_are_read_by_blocks(cluster: Clusters, tmp_path: Path) -> None:
    cluster(4).run(pretrained_body, path=str(tmp_path / "model.safetensors"))
