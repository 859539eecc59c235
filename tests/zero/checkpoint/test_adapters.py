"""Adapters on a frozen base: their values and checkpoints alone, without a gather of the base."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import device_of
from tests.zero.helpers.small_saves import contents
from tests.zero.helpers.told import Heard
from tests.zero.helpers.training import adamw
from zero.files.reader import Checkpoint
from zero.files.storage import DISK

WIDTH = 24
TRAINED = [*sorted(f"blocks.{i}.lora_{which}" for i in range(3) for which in "ab"), "scale"]


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank, and a buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, WIDTH) * 0.1)
        self.lora_b = nn.Parameter(torch.zeros(WIDTH, 2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.base(x) + x @ self.lora_a.T @ self.lora_b.T)


class Frozen(nn.Linear):
    """A unit without anything that is trained."""


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = Frozen(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted() for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def engine_of(seed: int = 1, blocks: int = 3, **settings: Any) -> zero.Engine:
    torch.manual_seed(seed)
    model = Model(blocks)
    return zero.initialize(
        model, adamw(model), zero.Config(timeout=10, units=("Adapted", "Frozen"), **settings)
    )


def train(engine: zero.Engine, context: Context, steps: int = 1) -> list[float]:
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + context.rank)
        x = torch.randn(4, WIDTH, generator=generator).to(device_of(engine.module))
        loss = engine(x).square().mean()
        losses.append(loss.item())
        train_on(engine, loss)
    return losses


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except zero.ZeroError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def values_body(context: Context, stage: int, precision: str) -> dict[str, Any]:
    engine = engine_of(stage=stage, precision=precision)
    train(engine, context)
    whole, masters = engine.state_dict(), engine.state_dict(master=True)
    engine.traffic.clear()
    trained = engine.state_dict(trainable_only=True)
    gathered = engine.traffic.bytes["all_gather"]
    numel = sum(p.numel() for p in engine.module.parameters() if p.requires_grad)
    found = {
        "a": engine.state_dict(include="*.lora_a"),
        "a and buffers": engine.state_dict(include=["*.lora_a", "*.calls"]),
        "trained a": engine.state_dict(master=True, trainable_only=True, include=("*.lora_a", "*.base.*")),
    }
    same = all(torch.equal(value, whole[name]) for name, value in {**trained, **found["a"]}.items())
    return {
        "names": sorted(trained),
        "same": same,
        "masters": all(torch.equal(v, masters[n]) for n, v in found["trained a"].items()),
        "found": {key: sorted(state) for key, state in found.items()},
        "gathered too much": gathered > 4 * (numel + 16 * 4),
        "typo": raised(lambda: engine.state_dict(include="*.lora_c")),
        "nothing": raised(lambda: engine.state_dict(trainable_only=True, include="*.base.*")),
        "empty": raised(lambda: engine.state_dict(include=[])),
        "number": raised(lambda: engine.state_dict(include=[3])),  # type: ignore[list-item]
        "trains": len(train(engine, context)),
    }


@pytest.mark.parametrize(("stage", "precision"), [(3, "fp32"), (3, "bf16"), (1, "bf16"), (0, "fp32")])
def test_adapters_are_read_without_the_base(cluster: Clusters, stage: int, precision: str) -> None:
    a = [f"blocks.{i}.lora_a" for i in range(3)]
    for rank, found in enumerate(cluster(2).run(values_body, stage=stage, precision=precision)):
        assert found["names"] == ([] if rank else TRAINED)
        assert found["found"] == {
            "a": [] if rank else a,
            "a and buffers": [] if rank else sorted([*a, *(f"blocks.{i}.calls" for i in range(3))]),
            "trained a": [] if rank else a,
        }
        assert found["same"]
        assert found["masters"]
        assert not found["gathered too much"]
        assert found["typo"].startswith("UsageError: include: '*.lora_c' matches no parameter or buffer")
        assert found["nothing"].startswith("UsageError: no parameter is left")
        assert found["empty"].startswith("UsageError: include is empty")
        assert found["number"].startswith("UsageError: include takes shell patterns of names")
        assert found["trains"] == 1


def in_block_body(context: Context) -> dict[str, Any]:
    """What programs that save adapters do: read model.state_dict(), and take some of it."""
    engine = engine_of()
    train(engine, context)
    model, whole = engine.module, engine.state_dict()
    trained = [p for p in model.parameters() if p.requires_grad]
    outside = raised(model.state_dict)
    with zero.gathered(trained):
        state = model.state_dict()
        mine = {name: value.cpu().clone() for name, value in state.items() if "lora" in name}
        absent = state["embedding.weight"]
        told = {
            "read": raised(lambda: absent + 1),
            "clone": raised(absent.clone),
            "pickle": raised(lambda: pickle.dumps(absent)),
            "numpy": raised(absent.numpy),
            "copied to": raised(lambda: torch.zeros(WIDTH, WIDTH).copy_(absent)),
            "parameter": raised(lambda: model.embedding.weight + 1),  # type: ignore[operator]
        }
        kept = dict(state)
    told["later"] = raised(kept["embedding.bias"].sum)
    with zero.gathered(model):
        told["whole"] = raised(kept["embedding.bias"].sum)
    return {
        "names": list(state) == list(model.state_dict(keep_vars=True)),
        "same": all(torch.equal(v, whole[n]) for n, v in mine.items()) if whole else True,
        "shape": (tuple(absent.shape), str(absent.dtype), repr(absent)),
        "outside": outside,
        "told": told,
    }


def test_a_state_dict_in_a_block_has_names_of_all_and_values_of_what_is_gathered(cluster: Clusters) -> None:
    for found in cluster(2).run(in_block_body):
        assert found["names"]
        assert found["same"]
        assert found["shape"] == (
            (WIDTH, WIDTH),
            "torch.float32",
            f"AbsentValues('embedding.weight', shape=({WIDTH}, {WIDTH}))",
        )
        assert found["outside"].startswith("ShardedParameterError")
        for name, message in found["told"].items():
            assert message.startswith("ShardedParameterError: "), (name, message)
            assert "parameter 'embedding." in message, (name, message)


def checkpoint_body(context: Context, runs: str, stage: int) -> dict[str, Any]:
    engine = engine_of(stage=stage)
    train(engine, context, 2)
    engine.traffic.clear()
    engine.save_checkpoint(Path(runs, "adapters"), {"at": 2}, trainable_only=True)
    gathered = engine.traffic.bytes["all_gather"]
    engine.save_checkpoint(Path(runs, "a"), include=["*.lora_a", "*.calls"], async_=True)
    engine.save_checkpoint(Path(runs, "whole"))
    refused = raised(lambda: engine.save_checkpoint(Path(runs, "none"), include="*.lora_c"))
    straight = train(engine, context, 2)

    other, heard = engine_of(stage=3 - stage), Heard()
    train(other, context)
    loaded = other.load_checkpoint(Path(runs, "adapters"))
    logging.getLogger("zero").removeHandler(heard)
    return {
        "gathered": gathered,
        "refused": refused,
        "state": (loaded.state, other.steps),
        "left out": loaded.left_out,
        "heard": heard.texts,
        "same": train(other, context, 2) == straight,
    }


@pytest.mark.parametrize("stage", [3, 1])
def test_a_checkpoint_of_the_adapters_alone_goes_on_with_the_same_base(
    cluster: Clusters, tmp_path: Path, stage: int
) -> None:
    for rank, found in enumerate(cluster(2).run(checkpoint_body, runs=str(tmp_path), stage=stage)):
        assert found["gathered"] == 0
        assert found["refused"].removeprefix("UsageError: ").removeprefix("rank 0: ").startswith("include: ")
        assert found["state"] == ({"at": 2}, 2)
        assert len(found["left out"]) == 2 + 3 * 3
        assert {"embedding.weight", "blocks.0.base.bias", "blocks.2.calls"} < set(found["left out"])
        assert len(found["heard"]) == (rank == 0)
        for text in found["heard"]:
            assert "adapters was saved without 11 of the model's parameters and buffers, which keep" in text
        assert found["same"]
    with Checkpoint(tmp_path / "adapters") as checkpoint:
        assert sorted(p.name for p in checkpoint.manifest.parameters) == TRAINED
        assert checkpoint.manifest.buffers == ()
        contents(checkpoint.path, DISK)
        assert sum(t.numel for k, t in checkpoint.manifest.tensors.items() if k[:5] == "model") == 289
    with Checkpoint(tmp_path / "a") as checkpoint:
        assert {p.name for p in checkpoint.manifest.parameters} == {f"blocks.{i}.lora_a" for i in range(3)}
        assert set(checkpoint.manifest.buffers) == {f"blocks.{i}.calls" for i in range(3)}
        assert not any("lora_b" in key or "base" in key for key in checkpoint.manifest.tensors)
    assert not (tmp_path / "none").exists()


def refused_body(context: Context, runs: str) -> dict[str, Any]:
    engine = engine_of(blocks=4)
    said = {"more trained": raised(lambda: engine.load_checkpoint(Path(runs, "adapters")))}
    engine = engine_of(seed=5)
    before = engine.state_dict()
    part = engine.load_checkpoint(Path(runs, "a"))
    after = engine.state_dict()
    engine._integrity.interrupt()
    engine.load_checkpoint(Path(runs, "adapters"))
    said["interrupted before"] = raised(lambda: train(engine, context))
    engine.load_checkpoint(Path(runs, "whole"))
    train(engine, context)
    renamed = engine_of(seed=6)
    rename = {f"blocks.{i}.lora_{x}": None for i in (1, 2) for x in "ab"}
    said["renamed to none"] = raised(lambda: renamed.load_checkpoint(Path(runs, "adapters"), rename=rename))
    return {
        "said": said,
        "changed": sorted(n for n in after if not torch.equal(after[n], before[n])),
        "kept": sorted(part.left_out),
        "whole": engine.load_checkpoint(Path(runs, "whole")).left_out,
    }


def test_what_a_partial_checkpoint_does_not_have_stays_and_is_no_repair(
    cluster: Clusters, tmp_path: Path
) -> None:
    cluster(2).run(checkpoint_body, runs=str(tmp_path), stage=3)
    for rank, found in enumerate(cluster(3).run(refused_body, runs=str(tmp_path))):
        said = found["said"]
        assert (
            "missing in the checkpoint: blocks.3.lora_a, blocks.3.lora_b, blocks.3.base"
            in said["more trained"]
        )
        assert "an optimizer step or a load was interrupted" in said["interrupted before"]
        assert "missing in the checkpoint: blocks.1.lora_a" in said["renamed to none"]
        a = [f"blocks.{i}.{name}" for i in range(3) for name in ("calls", "lora_a")]
        assert found["changed"] == ([] if rank else a)
        assert {"blocks.0.lora_b", "scale", "embedding.weight"} < set(found["kept"])
        assert found["whole"] == ()
