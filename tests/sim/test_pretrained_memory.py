"""Weights from files on a device that counts memory: never more than the shards and one unit."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.sim.layers import LAYER, MODEL, build, peak_of


def pretrained_body(context: Context, path: str) -> dict[str, int]:
    accelerator = context.accelerator
    gc.collect()
    before = accelerator.memory.stats().allocated
    with zero.init():
        model = build()
    zero.load_pretrained(model, path)
    waiting = accelerator.memory.stats().allocated - before
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    peak, engine = peak_of(accelerator, lambda: zero.initialize(model, optimizer, zero.Config(timeout=20)))
    loaded = engine.state_dict()
    if loaded:
        expected = build().state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in loaded.items())
    return {"waiting": waiting, "peak": peak - before}


@pytest.mark.parametrize("size", [1, 2])
def test_shards_and_one_unit(sim: Clusters, tmp_path: Path, size: int) -> None:
    save_file(build().state_dict(), tmp_path / "model.safetensors")
    for found in sim(size).run(pretrained_body, path=str(tmp_path)):
        assert found["waiting"] == 0
        assert found["peak"] <= MODEL // size + LAYER
