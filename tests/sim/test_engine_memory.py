"""The engine on a device that counts memory: exact peaks by formula, and how it runs out of memory."""

from __future__ import annotations

import gc
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from accelz import rebind
from accelz.conformance.cluster import Clusters, Context
from tests.sim.layers import LAYER, LAYERS, MODEL, WIDTH, build, peak_of
from tests.simulated import capacity
from tests.zero.helpers.training import collect_all, collected

SCALARS = 20 * 1024  # bytes of activations, and of everything much smaller than a layer


@collected()
def init_body(context: Context, stage: int, precision: Any, start: str) -> tuple[int, int]:
    """The peak during initialize() with an optimizer that keeps no state, and what stays allocated."""
    accelerator = context.accelerator
    gc.collect()
    before = accelerator.memory.stats().allocated
    model = build()
    if start == "device":
        for parameter in model.parameters():
            rebind(parameter, parameter.detach().to(accelerator.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = zero.Config(stage=stage, precision=precision, timeout=20)
    peak, engine = peak_of(accelerator, lambda: zero.initialize(model, optimizer, config))
    assert len(engine.units) == LAYERS
    return peak - before, accelerator.memory.stats().allocated - before


def expected_init(stage: int, size: int, narrow: bool, start: str) -> tuple[int, int]:
    """Bytes per rank with one layer per unit: the peak, and what stays allocated.

    If the model starts on the device, a layer's own bytes are freed before its buffer is made.
    """
    parts, sharded = size if stage else 1, stage == 3 and size > 1
    weights = LAYER // 2 if narrow else LAYER
    master = LAYER // parts if narrow else 0
    done = master + (weights // size if sharded else weights)
    # The layer in fp32; from it the master, then its 16-bit copy; from that, the shard.
    work = LAYER + (master + weights if narrow else 0)
    if sharded:
        work = max(work, weights + master + (weights // size))
    waiting = LAYER if start == "device" else 0
    peaks = [turn * done + work + (LAYERS - 1 - turn) * waiting for turn in range(LAYERS)]
    return max(peaks), LAYERS * done


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("start", ["host", "device"])
def test_peak_of_init(sim: Clusters, size: int, stage: int, precision: str, start: str) -> None:
    """Flattening needs room for the model once and its largest parameter, and at 16 bits for the masters."""
    narrow = precision == "bf16"
    expected, stays = expected_init(stage, size, narrow, start)
    for peak, rest in sim(size).run(init_body, stage=stage, precision=precision, start=start):
        assert 0 <= peak - expected <= SCALARS
        assert 0 <= rest - stays <= SCALARS
        masters = MODEL // (size if stage else 1) if narrow else 0
        assert peak <= MODEL + LAYER + masters + 2**20


@collected()
def peaks_body(context: Context, stage: int, precision: Any) -> dict[str, int]:
    accelerator = context.accelerator
    gc.collect()
    before = accelerator.memory.stats().allocated
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = zero.Config(stage=stage, precision=precision, prefetch=1, timeout=20)
    init, engine = peak_of(accelerator, lambda: zero.initialize(model, optimizer, config))
    rest = accelerator.memory.stats().allocated
    x = torch.ones(2, WIDTH, device=accelerator.device)
    peaks = {"init": init - before, "rest": rest - before}
    for _ in range(2):  # the second step prefetches by the recorded order
        forward, loss = peak_of(accelerator, lambda: engine(x).float().square().mean())
        backward, _ = peak_of(accelerator, partial(engine.backward, loss))
        step, _ = peak_of(accelerator, engine.step)
    peaks |= {"forward": forward - rest, "backward": backward - rest, "step": step - rest}
    gc.collect()
    peaks["after"] = accelerator.memory.stats().allocated - before
    return peaks


def expected_peaks(stage: int, size: int, narrow: bool) -> dict[str, int]:
    """Bytes per rank with AdamW, one layer per unit and one unit prefetched.

    "init", "rest" and "after" count from nothing, the others from "rest". narrow: weights and gradients of 16
    bits, with fp32 masters.
    """
    parts = size if stage else 1
    sharded = stage == 3 and size > 1
    layer, model = (LAYER // 2, MODEL // 2) if narrow else (LAYER, MODEL)
    weights = model // size if sharded else model
    state = (3 if narrow else 2) * MODEL // parts  # moments, and masters
    gradients = model // parts  # reduced ones, kept until the step is over
    whole = model if stage == 1 and size > 1 else 0  # kept until the step begins, for others to be added
    if sharded:
        # The layer in use and the next, both whole, and gradients as below; at the end there is no next one.
        backward = 2 * layer + 3 * layer + gradients - 2 * layer // size
    elif whole:
        backward = (
            layer + whole + gradients - layer // parts
        )  # autograd's gradient; the last is not reduced yet
    elif parts > 1:
        # Autograd's gradient, its copy in the buffer, and one being reduced; the last is not reduced yet.
        backward = 3 * layer + gradients - layer // parts
    else:
        backward = layer + gradients  # nothing is reduced, so the buffer is the gradient
    # The reference kernel's tensors, and the gradient cast to fp32, or scaled if it is averaged.
    scratch = 5 + (narrow or size > 1)
    return {
        "init": weights + state,
        "rest": weights + state,
        "forward": 2 * layer if sharded else 0,
        "backward": backward,
        "step": gradients + max(whole, scratch * LAYER // parts),
        "after": weights + state,
    }


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_peaks(sim: Clusters, size: int, stage: int, precision: str) -> None:
    """Peaks are those of the formula. Activations and scalars are below 20 KiB; a layer has 256 KiB."""
    for found in sim(size).run(peaks_body, stage=stage, precision=precision):
        expected = expected_peaks(stage, size, precision == "bf16")
        extra = {name: found[name] - nbytes for name, nbytes in expected.items()}
        assert all(0 <= nbytes <= SCALARS for nbytes in extra.values()), extra


def run_out_body(context: Context, when: str, path: str) -> dict[str, str]:
    """Run out of memory in one phase, and continue with the same engine once there is room again."""
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
    if when == "step":  # only some parameters may be updated; a checkpoint makes them consistent
        with pytest.raises(zero.UsageError, match="was interrupted"):
            engine.backward(engine(x).square().mean())
        engine.load_checkpoint(path)
    engine.backward(engine(x).square().mean())
    result["goes on"] = str(engine.step())
    return result


@pytest.mark.parametrize("when", ["gather", "gradients", "step"])
def test_out_of_memory_names_the_unit_and_the_engine_goes_on(
    sim: Clusters, tmp_path: Path, when: str
) -> None:
    purposes = {
        "gather": "out of memory: no room to gather unit '",
        "gradients": "out of memory: no room (to gather|for gradients of) unit '",
        "step": "out of memory: no room for the step of unit '",
    }
    for found in sim(2).run(run_out_body, when=when, path=str(tmp_path / "c")):
        assert "bytes needed" in found["error"], found
        assert "free. Try" in found["error"], found
        assert re.search(purposes[when], found["error"]), found
        assert found["torch's"] == "True"
        assert found["goes on"] == "True"


SMALLER = {
    "all state on the host": {"offload": {"params": "host", "optimizer": "host"}},
    "16 bits, and state on the host": {"precision": "bf16", "offload": {"optimizer": "host"}},
}


def retry_body(context: Context, room: int, settings: dict[str, Any]) -> tuple[str, str, int, bool]:
    """On a device that stays small: the two errors, the bytes left after them, and whether a step works."""
    accelerator = context.accelerator
    collect_all()
    before = accelerator.memory.stats().allocated
    with capacity(accelerator, before + room):
        errors = fail_to_initialize(zero.Config(timeout=20), zero.Config(timeout=20, **settings))
        gc.collect()
        left = accelerator.memory.stats().allocated - before
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine = zero.initialize(model, optimizer, zero.Config(timeout=20, **settings))
        engine.backward(engine(torch.ones(2, WIDTH, device=accelerator.device)).float().square().mean())
        return *errors, left, engine.step()


def fail_to_initialize(config: zero.Config, smaller: zero.Config) -> tuple[str, str]:
    """The errors for too large a configuration, and for a second attempt with the same model."""
    model, errors = build(), []
    for attempt in (config, smaller):
        try:
            zero.initialize(model, torch.optim.AdamW(model.parameters()), attempt)
        except zero.ZeroError as error:
            errors.append(f"{type(error).__name__}: {error}")
    first, second = errors
    return first, second


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("smaller", SMALLER)
def test_out_of_memory_in_init_and_a_smaller_configuration(sim: Clusters, size: int, smaller: str) -> None:
    """What was begun is freed to the last byte, and the model, built anew, fits on the same device."""
    room = 3 * MODEL // size - LAYER // 4  # weights and both moments, less the last piece
    for first, second, left, stepped in sim(size).run(retry_body, room=room, settings=SMALLER[smaller]):
        assert re.match(
            "OutOfMemoryError: out of memory: no room (to shard|for the optimizer state of) unit '", first
        )
        assert "free the model and the optimizer, and build them again" in first
        assert re.match("ModelError: .* build them again", second)
        assert left == 0
        assert stepped
