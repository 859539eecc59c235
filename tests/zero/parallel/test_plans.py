"""A plan in torchtitan's manner: tensor, sequence and loss parallel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.decoder import LENGTH, ROWS, WORDS, Decoder, one_process
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.meshes import mesh_of
from tests.zero.helpers.optimizers import sgd
from tests.zero.helpers.training import relative_error, state_error

STEPS, CLIP, KEYS = 3, 0.05, (2, 4)

pytestmark = pytest.mark.host  # meshes of gloo's


def planned(mesh: DeviceMesh) -> Decoder:
    """Between layers each rank has half of the tokens, in layers half of the heads, and of the words."""
    model = Decoder(KEYS)
    tokens, whole = Shard(1), Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
            "places": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
            "head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "norm": SequenceParallel(use_local_output=True),
                **{name: ColwiseParallel(input_layouts=tokens) for name in ("query", "key", "value")},
                "out": RowwiseParallel(output_layouts=tokens),
            },
        )
    return model


def loss_of(model: nn.Module, step: int, row: int) -> Tensor:
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(10 * step + row))
    logits = model(ids, torch.arange(LENGTH).expand(ROWS, -1))
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def body(context: Context) -> dict[str, float]:
    mesh = mesh_of(("dp", 2), ("tp", 2))
    row, found = mesh.get_local_rank("dp"), {}
    losses, norms, weights = one_process(Decoder(KEYS), loss_of, STEPS, CLIP)
    for stage in (1, 2, 3):
        model = planned(mesh["tp"])
        config = zero.Config(stage=stage, clip_norm=CLIP, timeout=20)
        engine = zero.initialize(model, sgd(model), config, mesh=mesh, data_dims="dp")
        told, seen = [], []
        for step in range(STEPS):
            with loss_parallel():
                loss = loss_of(model, step, row)
                train_on(engine, loss)
            told.append(float(full(loss.detach())))
            seen.append(float(engine.grad_norm or 0))
        found[f"stage {stage}: losses"] = relative_error(told, [each[row] for each in losses])
        found[f"stage {stage}: norms"] = relative_error(seen, norms)
        with zero.gathered(model):
            state = {name: full(p.detach()) for name, p in model.named_parameters()}
        found[f"stage {stage}: weights"] = state_error(state, weights)
    return found


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def test_a_planned_decoder_trains_as_one_process(cluster: Clusters) -> None:
    for found in cluster(4).run(body, limit=60):
        assert max(found.values()) < 1e-6, found
