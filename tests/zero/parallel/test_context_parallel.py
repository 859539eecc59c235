"""torch's `context_parallel` around forward and backward, beside one process with whole sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.decoder import LENGTH, ROWS, WORDS, Decoder, one_process
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.meshes import mesh_of
from tests.zero.helpers.optimizers import sgd
from tests.zero.helpers.training import relative_error, state_error
from zero.parallel import tokens

experimental = pytest.importorskip("torch.distributed.tensor.experimental", exc_type=ImportError)
rings: Any = pytest.importorskip(
    "torch.distributed.tensor.experimental._context_parallel._attention", exc_type=ImportError
)
strategies = pytest.importorskip("torch.distributed.tensor._ops.utils", exc_type=ImportError)

STEPS, CLIP, KEYS = 3, 0.05, (4, 4)
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

pytestmark = pytest.mark.host  # meshes of gloo's


@contextmanager
def rings_of_the_host() -> Iterator[None]:
    """Have `context_parallel` know the host's kernel, as it knows those of GPUs.

    torch 2.13 has the ring for any kernel with this signature, and registers it for kernels of GPUs alone.
    """
    for op, outputs, inputs in ((FORWARD, 2, 3), (BACKWARD, 3, 6)):
        strategies.register_op_strategy(op)(partial(_along_sequence, outputs=outputs, inputs=inputs))
        rings.custom_ops[op] = _on_ring
    try:
        yield
    finally:
        for op in (FORWARD, BACKWARD):
            del rings.custom_ops[op]


def _along_sequence(schema: Any, outputs: int, inputs: int) -> Any:
    placements = [Shard(2)] * (outputs + inputs)
    mesh = schema.get_mesh_from_args(validate=False)
    return strategies.expand_to_full_mesh_op_strategy(mesh, schema, [placements], input_index=outputs)


def _on_ring(op: Any, args: Any, kwargs: Any) -> Any:
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    group, given = info.compute_mesh.get_group(), info.local_args
    if op is FORWARD:
        q, k, v, dropout, causal = given
        found = rings._templated_ring_attention(
            group, 2, op, q, k, v, is_causal=causal, dropout_p=dropout, **info.local_kwargs
        )
    else:
        gradient, q, k, v, out, sums, dropout, causal = given
        found = rings._templated_ring_attention_backward(
            group,
            2,
            op,
            gradient,
            "grad_out",
            q,
            k,
            v,
            out,
            sums,
            causal,
            dropout_p=dropout,
            **info.local_kwargs,
        )
    return dispatcher.wrap(found, info.output_sharding.output_spec)


def batch_of(step: int, row: int) -> dict[str, Tensor]:
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(10 * step + row))
    labels = torch.cat([ids[:, 1:], torch.full((ROWS, 1), tokens.IGNORED)], 1)
    places = torch.arange(LENGTH).expand(ROWS, -1).clone()
    return {"ids": ids, "places": places, "labels": labels}


def loss_of(model: nn.Module, step: int, row: int) -> Tensor:
    batch = batch_of(step, row)
    return F.cross_entropy(model(batch["ids"], batch["places"]).flatten(0, 1), batch["labels"].flatten())


def body(context: Context) -> dict[str, float]:
    mesh = mesh_of(("dp", 2), ("cp", 2))
    row, found = mesh.get_local_rank("dp"), {}
    losses, norms, weights = one_process(Decoder(KEYS), loss_of, STEPS, CLIP)
    for stage in (2, 3):
        model = Decoder(KEYS, recomputed=stage == 3)
        config = zero.Config(stage=stage, clip_norm=CLIP, timeout=20)
        engine = zero.initialize(model, sgd(model), config, mesh=mesh, data_dims=("dp", "cp"))
        told, seen = [], []
        for step in range(STEPS):
            batch = batch_of(step, row)
            with (
                rings_of_the_host(),
                experimental.context_parallel(
                    mesh["cp"], buffers=list(batch.values()), buffer_seq_dims=[1] * len(batch)
                ),
            ):
                logits = model(batch["ids"], batch["places"])
                assert logits.shape[1] == LENGTH // 2
                loss = tokens.cross_entropy(logits, batch["labels"], mesh.get_group("cp"))
                train_on(engine, loss)
            told.append(loss.item())
            seen.append(float(engine.grad_norm or 0))
        found[f"stage {stage}: losses"] = relative_error(told, [each[row] for each in losses])
        found[f"stage {stage}: norms"] = relative_error(seen, norms)
        state = engine.state_dict()
        found[f"stage {stage}: weights"] = state_error(state, weights) if state else 0.0
    return found


def test_rings_train_as_one_process(cluster: Clusters) -> None:
    for found in cluster(4).run(body, limit=60):
        assert max(found.values()) < 1e-6, found
