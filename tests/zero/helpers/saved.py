"""Checkpoints of zero's to consolidate, and what a reader of the output finds in it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

import zero
from accelz.conformance.cluster import Context
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import LanguageModel, tokens
from tests.zero.helpers.training import adamw

State = dict[str, Tensor]


def save(context: Context, folder: str, precision: str, stage: int = 3) -> None:
    """Train a little and save `folder`/checkpoint; rank 0 also leaves the whole state dicts there."""
    torch.manual_seed(3)
    model = LanguageModel()
    config = zero.Config(stage=stage, precision=precision, timeout=10)  # type: ignore[arg-type]
    engine = zero.initialize(model, adamw(model), config)
    for step in range(3):
        train_on(engine, model(tokens(step, context.rank, model))["loss"])
    engine.save_checkpoint(Path(folder) / "checkpoint")
    for master in (True, False):
        state = engine.state_dict(master=master)
        if context.rank == 0:
            torch.save(state, Path(folder) / f"state-{master}.pt")


def expected(folder: Path, master: bool) -> State:
    """The whole state dict that the engine had when it saved."""
    state = torch.load(folder / f"state-{master}.pt", weights_only=True)
    assert isinstance(state, dict)
    return state


def read(out: Path) -> State:
    """Everything in a directory of safetensors, tied names included, read with safetensors itself."""
    state: State = {}
    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            assert metadata.pop("format") == "pt"
            state |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            state |= {alias: state[name] for alias, name in metadata.items()}
    return state


def weight_map(out: Path) -> dict[str, str]:
    """The index of a sharded model."""
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(_payload(p) for p in out.glob("*.safetensors"))
    found = index["weight_map"]
    assert isinstance(found, dict)
    return found


def _payload(path: Path) -> int:
    data = path.read_bytes()
    return len(data) - 8 - int.from_bytes(data[:8], "little")


def same(found: State, wanted: State) -> bool:
    """Whether two state dicts are equal, bit for bit."""
    assert sorted(found) == sorted(wanted)
    return all(
        found[name].dtype == value.dtype
        and found[name].shape == value.shape
        and torch.equal(_bits(found[name]), _bits(value))
        for name, value in wanted.items()
    )


def cast(state: State, dtype: torch.dtype) -> State:
    """What is in floating point in another dtype."""
    return {name: v.to(dtype) if v.is_floating_point() else v for name, v in state.items()}


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)
