"""Weights that the ranks of a node hold in common: once per node, and never changed under a reader."""

from __future__ import annotations

import errno
import os
import time
import warnings
from typing import Any

import torch
from torch import nn

import zero
from accelz import Slot
from accelz.conformance.cluster import Clusters, Context
from accelz.gloo import GlooLanes
from tests.zero.helpers.models import Stack
from tests.zero.helpers.paths import decaying, straight

NUMEL = 1000


def shared_body(context: Context) -> dict[str, Any]:
    """What rank 1 writes into its slice is there for all ranks, under the same Parameters."""
    parameters = [nn.Parameter(torch.full((10, 50), float(i))) for i in range(2)]
    slots = [Slot(500 * i, (10, 50), (50, 1), 500) for i in range(2)]
    strategy = context.accelerator.flat_buffers
    private = strategy.flatten(parameters, slots, NUMEL, torch.float32)
    common = strategy.share(private, context.group)
    assert common is not None
    result: dict[str, Any] = {"private": private.data.untyped_storage().nbytes()}
    context.accelerator.collectives.barrier(context.group)
    if context.rank == 1:
        common.data[NUMEL // 2 :].fill_(7.0)
    context.accelerator.collectives.barrier(context.group)
    common.release()
    result["sums"] = [p.sum().item() for p in parameters]
    result["views"] = [p.data_ptr() - common.data.data_ptr() for p in parameters]
    return result


def test_ranks_see_the_same_bytes(cluster: Clusters) -> None:
    for found in cluster(2).run(shared_body):
        assert found == {"private": 0, "sums": [0.0, 3500.0], "views": [0, 2000]}


def refused_body(context: Context, refusal: str) -> dict[str, Any]:
    """Training where memory cannot be shared: on all ranks privately, with the same losses."""
    original = os.memfd_create, os.posix_fallocate, os.fstat

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    if refusal == "no memory" and context.rank == 0:
        os.posix_fallocate = refuse  # type: ignore[assignment]
    if refusal == "no system call" and context.rank == 0:
        os.memfd_create = refuse
    if refusal == "another node" and context.rank == context.size - 1:
        os.fstat = refuse  # type: ignore[assignment]
    context.accelerator.flat_buffers._apart.clear()  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(3)
            model = Stack()
            engine = zero.initialize(model, decaying(model), zero.Config(timeout=10))
    finally:
        os.memfd_create, os.posix_fallocate, os.fstat = original
        context.accelerator.flat_buffers._apart.clear()  # type: ignore[attr-defined]
    losses = []
    for step in range(3):
        loss = straight(model, step, context.rank)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    said = [str(w.message) for w in caught if "once per rank" in str(w.message)]
    return {"common": any(u.common for u in engine.units), "losses": losses, "said": said}


def test_where_memory_cannot_be_shared_each_rank_has_its_own(cluster: Clusters) -> None:
    shared = cluster(2).run(refused_body, refusal="")
    assert all(found["common"] for found in shared)
    for refusal, reason in {
        "no memory": "bytes of shared memory cannot be allocated",
        "no system call": "memory cannot be shared here",
        "another node": "",
    }.items():
        apart = cluster(2).run(refused_body, refusal=refusal)
        assert [f["common"] for f in apart] == [False, False], refusal
        assert [f["losses"] for f in apart] == [f["losses"] for f in shared], "bit for bit"
        assert len(apart[0]["said"]) == (1 if reason else 0)
        assert reason in "".join(apart[0]["said"])
        assert apart[1]["said"] == []


class Slow(nn.Module):
    """Waits before it reads its weight."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64, bias=False)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x @ self.inner.weight.t()


def reader_body(context: Context) -> tuple[float, float]:
    """An evaluation between backward() and step(), slow on rank 1: nobody steps before it has read."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Slow(0.0), nn.Linear(64, 1))
    engine = zero.initialize(
        model, torch.optim.SGD(model.parameters(), lr=1.0), zero.Config(units=[Slow], timeout=10)
    )
    x = torch.ones(4, 64)
    engine.backward(model(x).sum())
    with torch.no_grad():
        first = model(x).sum().item()
        model[1].seconds = 0.5 * context.rank
        second = model(x).sum().item()
    engine.step()
    return first, second


def test_no_weight_changes_under_a_reader(cluster: Clusters) -> None:
    for first, second in cluster(2).run(reader_body):
        assert second == first


def both_ways_body(context: Context) -> tuple[list[float], list[float]]:
    """Losses of the same training through shared memory and through gloo."""
    native, losses = context.accelerator.collectives, []
    for collectives in (native, GlooLanes()):
        context.accelerator.collectives = collectives
        try:
            torch.manual_seed(3)
            model = Stack()
            config = zero.Config(precision="bf16", clip_norm=1.0, timeout=10)
            engine = zero.initialize(model, decaying(model), config)
            losses.append([_step(engine, straight(model, step, context.rank)) for step in range(5)])
        finally:
            context.accelerator.collectives = native
    return losses[0], losses[1]


def _step(engine: zero.Engine, loss: torch.Tensor) -> float:
    engine.backward(loss)
    engine.step()
    return loss.item()


def test_losses_are_those_of_the_gloo_path(cluster: Clusters) -> None:
    """Two values have one sum, whatever the order: bit for bit at two ranks."""
    for shared, gloo in cluster(2).run(both_ways_body):
        assert shared == gloo
