"""The engine on a device that counts: exact peaks by formula, and what running out of memory looks like."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from accelz.accelerator import Accelerator
from accelz.conformance.cluster import Clusters, Context

WIDTH, LAYERS = 256, 6
LAYER = WIDTH * WIDTH * 4  # bytes of one fp32 layer: 64-byte aligned, so that no buffer is padded
MODEL = LAYERS * LAYER
BATCH = 2 * WIDTH * 4  # bytes of a batch of two rows


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def peak_of(accelerator: Accelerator, work: Callable[[], Any]) -> tuple[int, Any]:
    """The device's peak during `work`, and what it returned."""
    gc.collect()
    accelerator.memory.reset_peak()
    value = work()
    return accelerator.memory.stats().peak, value


def peaks_body(context: Context, stage: int) -> dict[str, int]:
    accelerator = context.accelerator
    gc.collect()
    before = accelerator.memory.stats().allocated
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = zero.Config(stage=stage, prefetch=1, timeout=20)
    init, engine = peak_of(accelerator, lambda: zero.initialize(model, optimizer, config))
    rest = accelerator.memory.stats().allocated
    x = torch.ones(2, WIDTH, device=accelerator.device)
    peaks = {"init": init - before, "rest": rest - before}
    for _ in range(2):  # the second step has the recorded order to prefetch by
        forward, loss = peak_of(accelerator, lambda: engine(x).square().mean())
        backward, _ = peak_of(accelerator, partial(engine.backward, loss))
        step, _ = peak_of(accelerator, engine.step)
    peaks |= {"forward": forward - rest, "backward": backward - rest, "step": step - rest}
    gc.collect()
    peaks["after"] = accelerator.memory.stats().allocated - before
    return peaks


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_peaks(sim: Clusters, size: int, stage: int) -> None:
    """fp32 AdamW at W ranks, layers as units; activations and scalars are below one MiB / 16."""
    small = 64 * 1024
    for found in sim(size).run(peaks_body, stage=stage):
        sharded = stage == 3 and size > 1
        moments = 2 * MODEL // size
        weights = MODEL // size if sharded else MODEL
        layers_whole = 2 if sharded else 0  # the one in use and the one prefetched
        assert weights + moments <= found["rest"] <= weights + moments + small
        # Init: what is there at the end, or one whole unit beside the shards made so far.
        assert found["init"] <= weights + moments + (LAYER if sharded else 0) + small
        assert found["forward"] <= layers_whole * LAYER + small
        # Backward: gathered layers; whole gradients in the making and under reduction (the layer's own
        # gradient from autograd beside its copy); and all reduced gradients.
        gradients = MODEL // size
        assert found["backward"] <= (layers_whole + 4) * LAYER + gradients + small
        # Step: gradients that wait, and scratch of the kernel's reference: six tensors of a layer's shard.
        assert found["step"] <= gradients + 6 * LAYER // size + small
        assert found["after"] - found["rest"] <= BATCH + small


def run_out_body(context: Context, when: str, path: str) -> dict[str, str]:
    """Out of memory in one phase; the process goes on, with the same engine or a smaller one."""
    from accelz_sim import memory

    accelerator = context.accelerator
    free = accelerator.memory.stats().capacity
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.ones(2, WIDTH, device=accelerator.device)
    result = {}

    def limit(extra: int) -> None:
        gc.collect()
        memory.set_capacity(accelerator.memory.stats().allocated + extra)

    try:
        if when == "init":
            limit(2 * LAYER)
        engine = zero.initialize(model, optimizer, zero.Config(timeout=20))
        engine.save_checkpoint(path)
        if when == "gather":
            limit(LAYER // 2)
        loss = engine(x).square().mean()
        if when == "gradients":
            limit(LAYER // 2)
        engine.backward(loss)
        if when == "step":
            limit(1024)
        engine.step()
        result["error"] = "nothing raised"
    except zero.OutOfMemoryError as error:
        result["error"] = str(error)
        result["torch's"] = str(isinstance(error, torch.OutOfMemoryError))
    finally:
        memory.set_capacity(free)
    if when == "init":  # free it all, and retry with a smaller configuration
        del model, optimizer
        gc.collect()
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
        engine = zero.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), zero.Config(timeout=20))
    if when == "step":  # half of the parameters may be updated: a checkpoint makes them one again
        with pytest.raises(zero.UsageError, match="was interrupted"):
            engine.backward(engine(x).square().mean())
        engine.load_checkpoint(path)
    engine.backward(engine(x).square().mean())
    result["goes on"] = str(engine.step())
    return result


@pytest.mark.parametrize("when", ["init", "gather", "gradients", "step"])
def test_out_of_memory_names_the_unit_and_the_engine_goes_on(
    sim: Clusters, tmp_path: Path, when: str
) -> None:
    purposes = {
        "init": "no room (to shard|for the optimizer state of) unit '",
        "gather": "no room to gather unit '",
        "gradients": "no room (to gather|for gradients of) unit '",
        "step": "no room for the step of unit '",
    }
    for found in sim(2).run(run_out_body, when=when, path=str(tmp_path / "c")):
        assert "bytes wanted" in found["error"], found
        assert "free of" in found["error"], found
        assert re.search(purposes[when], found["error"]), found
        assert found["torch's"] == "True"
        assert found["goes on"] == "True"
