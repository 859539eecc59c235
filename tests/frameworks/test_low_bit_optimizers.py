"""Optimizers of torchao and bitsandbytes that keep their state in 8 and 4 bits, at any number of ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_blockwise
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.frameworks.low_bit_optimizers import OPTIMIZERS, eagerly, model
from tests.zero.helpers.loops import train_on
from zero.optimizer.piece_state import tensors_beside

STEPS, MORE = 3, 2
NAMES = ("0.weight", "0.bias", "2.weight")
"""Two matrices whose state is quantised, of 32 and 33 blocks, and a vector that is too small for that."""


QUANTISED = {
    "torchao AdamW8bit": ("exp_avg.codes", torch.uint8, 1),
    "torchao AdamW4bit": ("exp_avg.codes", torch.uint8, 2),
    "torchao AdamWFp8": ("exp_avg.codes", torch.float8_e4m3fn, 1),
    "bitsandbytes AdamW8bit": ("state1", torch.uint8, 1),
}
"""For each, a state tensor, its dtype, and how many values an element has."""


def loss_of(network: nn.Module, step: int) -> Tensor:
    """All ranks have the same batch, so that their mean is what one rank has."""
    batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
    return network(batch).square().mean()  # type: ignore[no-any-return]


def unsharded(name: str) -> tuple[list[float], dict[str, Tensor]]:
    network = model()
    optimizer, losses = OPTIMIZERS[name](network), []
    for step in range(STEPS + MORE):
        loss = loss_of(network, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, copy.deepcopy(network.state_dict())


def engine_of(name: str, **settings: Any) -> zero.Engine:
    network = model()
    return zero.initialize(network, OPTIMIZERS[name](network), zero.Config(timeout=30, **settings))


def trained(engine: zero.Engine, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of(engine.module, engine.steps)
        train_on(engine, loss)
        losses.append(loss.item())
    return losses


def state_of(engine: zero.Engine) -> dict[str, Tensor]:
    found = {name: engine.full_optimizer_state(name) for name in NAMES}
    return {f"{name}/{key}": value for name, state in found.items() for key, value in state.items()}


def saved_body(context: Context, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with eagerly():
        for name in OPTIMIZERS:
            for stage in (3, 0):
                engine = engine_of(name, stage=stage)
                losses = trained(engine, STEPS)
                engine.save_checkpoint(f"{path}/{name}/{stage}")
                state = state_of(engine)
                losses += trained(engine, MORE)
                found[f"{name}, stage {stage}"] = losses, engine.state_dict(), state
            found[name] = unsharded(name)
    return found


def loaded_body(context: Context, path: str) -> dict[str, Any]:
    found = {}
    with eagerly():
        for name in OPTIMIZERS:
            for stage, saved in ((3, 3), (1, 0)):
                engine = engine_of(name, stage=stage)
                engine.load_checkpoint(f"{path}/{name}/{saved}")
                state = state_of(engine)
                losses = trained(engine, MORE)
                found[f"{name}, stage {saved}"] = losses, engine.state_dict(), state
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_plan_knows_how_much_they_keep(name: str) -> None:
    network = model()
    optimizer = OPTIMIZERS[name](network)
    with eagerly():
        plan = zero.plan(network, optimizer, zero.Config(), ranks=1)
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    kept = (tensors_beside(optimizer.state[p], p) for p in network.parameters())
    expected = sum(tensor.nbytes for tensors in kept for tensor in tensors)
    assert plan.memory.rest["device"].optimizer == pytest.approx(expected, abs=64)  # padding


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(v, second[k]) for k, v in first.items())


def test_state_is_the_unsharded_one_and_loads_at_any_number_of_ranks(
    cluster: Clusters, tmp_path: Path
) -> None:
    saved, _ = cluster(2).run(saved_body, path=str(tmp_path), limit=120)
    (alone,) = cluster(1).run(loaded_body, path=str(tmp_path), limit=120)
    three, *_ = cluster(3).run(loaded_body, path=str(tmp_path), limit=120)
    for name in OPTIMIZERS:
        reference, weights = saved[name]
        key, dtype, packed = QUANTISED[name]
        for stage in (3, 0):
            losses, after, state = saved[f"{name}, stage {stage}"]
            assert losses == reference, name
            assert same(after, weights), name
            codes = state[f"0.weight/{key}"]
            assert codes.dtype is dtype
            assert codes.numel() * packed == 64 * 128
            assert any(v.dtype is torch.float32 and v.shape == (128,) for v in state.values())
            losses, after, loaded = alone[f"{name}, stage {stage}"]
            assert same(loaded, state), name
            assert losses == reference[STEPS:], name
            assert same(after, weights), name
            losses, _, loaded = three[f"{name}, stage {stage}"]
            assert same(loaded, state), name
            assert losses == pytest.approx(reference[STEPS:], rel=1e-2), name
        if "bitsandbytes" in name:
            state = saved[f"{name}, stage 3"][2]
            packed = [state[f"0.weight/{key}1"].contiguous() for key in ("state", "absmax", "qmap")]
            wanted = dequantize_blockwise(packed[0], absmax=packed[1], code=packed[2], blocksize=256)
            assert torch.equal(state["0.weight/state1.dequantised"], wanted)
        else:
            assert saved[f"{name}, stage 3"][2]["0.weight/exp_avg"].dtype is torch.float32


class Stage(nn.Module):
    """Some of the model's layers, under their names there."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        for number in numbers:
            self.add_module(str(number), model()[number])  # type: ignore[index]


def mesh_body(context: Context, path: str) -> dict[str, Any]:
    """State in 8 bits: from ranks that all have data to a pipeline's stages and back, but not into blocks."""
    name, found = "torchao AdamW8bit", {}
    make = OPTIMIZERS[name]
    with eagerly():
        one = engine_of(name)
        trained(one, STEPS)
        one.save_checkpoint(f"{path}/one")
        wanted = state_of(one)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stage = Stage(2) if mesh.get_local_rank("pp") else Stage(0)
        staged = zero.initialize(
            stage, make(stage), zero.Config(timeout=30, local_modules={"*": "pp"}), mesh=mesh, data_dims="dp"
        )
        staged.load_checkpoint(f"{path}/one")
        mine = {n: staged.full_optimizer_state(n) for n, _ in stage.named_parameters() if n in NAMES}
        found["stage"] = all(
            torch.equal(value, wanted[f"{n}/{key}"])
            for n, state in mine.items()
            for key, value in state.items()
        )
        staged.save_checkpoint(f"{path}/stages")
        again = engine_of(name, stage=1)
        again.load_checkpoint(f"{path}/stages")
        found["again"] = same(state_of(again), wanted)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        blocks = model()
        parallelize_module(blocks, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        config = zero.Config(timeout=30, whole_parameters=False)
        with pytest.raises(zero.OptimizerError, match=r"'exp_avg' of '0\.weight' has blocks of a slice"):
            zero.initialize(blocks, make(blocks), config, mesh=mesh, data_dims="dp")
    return found


def test_state_goes_into_stages_but_not_into_blocks(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(4).run(mesh_body, path=str(tmp_path), limit=120):
        assert all(found.values()), found
