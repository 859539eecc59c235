"""Compiled models whose parameters are DTensors over other dimensions than the engine's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.optimizers import sgd
from tests.zero.helpers.tensor_parallel import WIDTH, Block, compared
from tests.zero.helpers.training import relative_error

STEPS, CLIP = 2, 0.05
pytestmark = pytest.mark.host  # meshes of gloo's

PLAN = {
    "blocks.*.norm": SequenceParallel(sequence_dim=0, use_local_output=True),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(0)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(0)),
    "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
}


class Parts(nn.Module):
    """Between blocks, ranks have parts of the tokens: gradients of norms come as partial sums."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList([Block()]), nn.Linear(WIDTH, 4)
        self.blocks[0].up.bias.requires_grad_(False)
        self.parts, self.part = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        if mesh is not None:
            parallelize_module(self, mesh, PLAN)

    def forward(self, x: Tensor) -> Tensor:
        x = x.chunk(self.parts)[self.part]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x).square().mean()
        return out


def tokens(step: int, data: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + data))


def body(context: Context, inner: str) -> dict[str, float]:
    copies = context.size // 2
    mesh = init_device_mesh("cpu", (copies, 2), mesh_dim_names=("dp", "tp"))
    mine, reference = mesh.get_local_rank("dp"), Parts(None)
    plain, wanted, norms = sgd(reference), [], []
    for step in range(STEPS):
        losses = [reference(tokens(step, data)) for data in range(copies)]
        torch.stack(losses).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(reference.parameters(), CLIP)))
        plain.step()
        plain.zero_grad()
        wanted.append(losses[mine].item())
    wanted.append(reference(tokens(STEPS, mine)).item())
    weights = {name: value.detach() for name, value in reference.state_dict().items()}

    model = Parts(mesh["tp"])
    config = zero.Config(timeout=100, clip_norm=CLIP, compile=zero.Compile(inner=inner))
    engine = zero.initialize(model, sgd(model), config, mesh=mesh, data_dims="dp")
    told, found = [], []
    for step in range(STEPS):
        loss = model(tokens(step, mine))
        train_on(engine, loss)
        told.append(loss.item())
        found.append(float(engine.grad_norm or 0))
    with torch.no_grad():
        told.append(model(tokens(STEPS, mine)).item())
    report = engine.explain()
    assert (report.mode, report.not_generated) == ("graph", ""), report
    assert [graph.reduced for graph in report.graphs] == [0, 7, 0]
    return {
        "losses": relative_error(told, wanted),
        "norms": relative_error(found, norms),
        "weights": compared(engine, model, weights),
    }


def test_graphs_of_tensor_parallel_models(cluster: Clusters) -> None:
    for errors in cluster(4).run(partial(body, inner="aot_eager"), limit=60):
        assert max(errors.values()) < 1e-6, errors


@pytest.mark.slow  # compiles
def test_generated_code_of_tensor_parallel_models(cluster: Clusters) -> None:
    """The graph of one copy of the model has all collectives but the gathers, which others have as well."""
    for errors in cluster(2).run(partial(body, inner="inductor"), limit=120):
        assert max(errors.values()) < 1e-6, errors
