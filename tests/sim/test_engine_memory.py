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


def expected_peaks(stage: int, size: int) -> dict[str, int]:
    """Bytes per rank at W ranks, fp32 AdamW, one layer per unit, one unit prefetched. "init" and "rest"
    count from nothing, the others from "rest"."""
    parts = size if stage else 1
    sharded = stage == 3 and size > 1
    weights = MODEL // size if sharded else MODEL
    moments = 2 * MODEL // parts
    gradients = MODEL // parts  # reduced, until the step is over
    if sharded:
        # The layer in use and the next one whole, three whole gradients as below; the last layer's
        # gradient is not reduced yet.
        backward = 2 * LAYER + 3 * LAYER + gradients - LAYER // size
    elif parts > 1:
        backward = 3 * LAYER + gradients  # autograd's own, its copy in the buffer, one under reduction
    else:
        backward = LAYER + gradients  # nothing is reduced: the buffer is the gradient
    scratch = 5 + (size > 1)  # tensors of the reference kernel; the scaled gradient where there is a mean
    return {
        "init": weights + moments,
        "rest": weights + moments,
        "forward": 2 * LAYER if sharded else 0,
        "backward": backward,
        "step": gradients + scratch * LAYER // parts,
        "after": weights + moments,
    }


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_peaks(sim: Clusters, size: int, stage: int) -> None:
    """Peaks are those of the formula; activations and scalars are below 20 KiB, a layer has 256."""
    for found in sim(size).run(peaks_body, stage=stage):
        extra = {name: found[name] - nbytes for name, nbytes in expected_peaks(stage, size).items()}
        assert all(0 <= nbytes <= 20 * 1024 for nbytes in extra.values()), extra


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
