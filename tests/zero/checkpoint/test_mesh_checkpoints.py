"""One checkpoint of a job whose ranks form a mesh."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers import saved as files
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.meshes import WIDTH, MixtureModel, Stage, mesh_of, mixture, tokens
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.told import raised
from tests.zero.helpers.training import adamw
from zero.consolidate import consolidate, open_source, verify
from zero.files.reader import Checkpoint
from zero.sharding.distributed import local_of

RANKS = 4


def state_of(engine: zero.Engine) -> dict[str, Tensor]:
    """Weights and optimizer state that this rank is the source of, by name."""
    weights, found = engine.state_dict(), {}
    for name, _ in engine.module.named_parameters():
        for key, value in engine.full_optimizer_state(name).items():
            found[f"{name}: {key}"] = value.cpu()
    return {**weights, **found} if weights else {}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def experts(context: Context, mesh: Any, stage: int = 3) -> tuple[zero.Engine, MixtureModel]:
    model = mixture(mesh.get_group("ep"))
    config = zero.Config(stage=stage, timeout=20, local_modules={"blocks.*.experts": "ep"})
    engine = zero.initialize(model, adamw(model), config, mesh=mesh, data_dims=("dp", "ep"))
    return engine, model


def experts_body(context: Context, folder: str) -> dict[str, Any]:
    """Saved with experts of each rank's own; loaded so at another stage, and in one process, and back."""
    mesh, path = mesh_of(("dp", 2), ("ep", 2)), Path(folder) / "experts"
    engine, model = experts(context, mesh)
    train_on(engine, model(tokens(0, context.rank).to(engine.device)))
    engine.save_checkpoint(path, rank_state={"rank": context.rank})
    saved = state_of(engine)
    again, other = experts(context, mesh, stage=1)
    loaded = again.load_checkpoint(path)
    found = {
        "again": same(state_of(again), saved),
        "ranks": [each["rank"] for each in loaded.rank_states],
    }

    def whole_name(name: str) -> str:
        number = "1" if name.endswith("[ep=1]") else "0"
        return name.split("[")[0].replace("experts.0", f"experts.{number}")

    whole = mixture()
    one = zero.initialize(whole, adamw(whole), zero.Config(timeout=20))
    with pytest.raises(zero.StateError, match=r"missing .*experts\.1.*unexpected .*\[ep=0\].*rename="):
        one.load_checkpoint(path)
    one.load_checkpoint(path, rename=whole_name)
    state, number = state_of(one), mesh.get_local_rank("ep")
    if state and saved:
        mine = {name.replace("experts.0", f"experts.{number}"): value for name, value in saved.items()}
        found["whole"] = all(torch.equal(state[name], value) for name, value in mine.items())
    one.save_checkpoint(Path(folder) / "whole")

    def own_name(name: str) -> str | None:
        if f"experts.{1 - number}." in name:
            return None
        return name.replace(f"experts.{number}.", "experts.0.")

    back, third = experts(context, mesh, stage=2)
    back.load_checkpoint(Path(folder) / "whole", rename=own_name)
    found["back"] = same(state_of(back), saved)
    train_on(back, third(tokens(1, context.rank).to(engine.device)))
    train_on(again, other(tokens(1, context.rank).to(engine.device)))
    found["on"] = all(
        torch.allclose(a, b) for a, b in zip(state_of(back).values(), state_of(again).values(), strict=True)
    )
    return found


def test_experts_are_stored_with_their_coordinates(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(RANKS).run(experts_body, folder=str(tmp_path), limit=60):
        assert found.pop("ranks") == [0, 1, 2, 3]
        assert all(found.values()), found
    manifest = Checkpoint(tmp_path / "experts").manifest
    names = {entry.name for entry in manifest.parameters}
    assert len(names) == len(manifest.parameters)
    assert {"head.weight", *(f"blocks.0.experts.0.up.weight[ep={n}]" for n in (0, 1))} < names
    assert "blocks.0.experts.0.up.weight" not in names


class Alike(nn.Module):
    """A stage whose parameters have the same names as those of others."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.first = Stage(number)
        self.scale = nn.Parameter(torch.full((), 1.0 + number))
        self.register_buffer("shift", torch.full((2,), float(number)))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.scale


class Part(nn.Module):
    """Some layers of a model, under the names that they have in all of it."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        torch.manual_seed(4)
        layers = {str(i): nn.Linear(WIDTH, WIDTH) for i in range(4)}
        self.layers = nn.ModuleDict({str(i): layers[str(i)] for i in numbers})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x.square().mean()


def whole_and_parts(mesh: Any, folder: Path) -> dict[str, bool]:
    """Stages that have the names of the whole model: loaded as a whole, and that into other stages."""
    config = zero.Config(timeout=20, local_modules={"*": "pp"})
    first = mesh.get_local_rank("pp") == 0
    model = Part(0, 1) if first else Part(2, 3)
    engine = zero.initialize(model, adamw(model), config, mesh=mesh, data_dims="dp")
    train_on(engine, model(tokens(0, engine.rank).to(engine.device)))
    engine.save_checkpoint(folder / "parts")
    saved = state_of(engine)
    whole = Part(0, 1, 2, 3)
    one = zero.initialize(whole, adamw(whole), zero.Config(timeout=20, stage=2))
    one.load_checkpoint(folder / "parts")
    one.save_checkpoint(folder / "all")
    state = state_of(one)
    both = not (state and saved) or all(torch.equal(state[name], value) for name, value in saved.items())
    model = Part(0) if first else Part(1, 2, 3)
    other = zero.initialize(model, adamw(model), config, mesh=mesh, data_dims="dp")
    other.load_checkpoint(folder / "all")
    mine, every = (
        state_of(other),
        one._communicator.all_gather_object({k: v.tolist() for k, v in state.items()}),
    )
    parts = all(torch.equal(value, torch.tensor(every[0][name])) for name, value in mine.items())
    return {"whole": both, "parts": parts}


def of_one_place(mesh: Any, saved: dict[str, Tensor], folder: Path) -> dict[str, bool]:
    """An engine that knows its own data group only takes its blocks of the whole, and saves only these."""
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 2), nn.LayerNorm(2))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20), process_group=mesh.get_group("dp"))
    engine.load_checkpoint(folder / "blocks")
    mine = {name: local_of(engine.full_master(name)) for name, _ in model.named_parameters()}
    place = folder / f"place {mesh.get_local_rank('tp')}"
    refused = raised(partial(engine.save_pretrained, place / "weights"))
    assert refused.startswith("UsageError: save_pretrained(): ranks have parts of DTensors, such as 0.weight")
    engine.save_checkpoint(place)
    with open_source(place) as source:
        assert verify(source) == []
        with pytest.raises(zero.CheckpointError, match=r"only a part of parameter '0\.weight', block \("):
            consolidate(source, place / f"out {engine.rank}")
    whole = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 2), nn.LayerNorm(2))
    other = zero.initialize(whole, adamw(whole), zero.Config(timeout=20), process_group=mesh.get_group("dp"))
    with pytest.raises(zero.StateError, match=r"'0\.weight' was saved as block .* and is now plain values"):
        other.load_checkpoint(place)
    return {"place": same(mine, saved)}


def blocks_body(context: Context, folder: str) -> dict[str, bool]:
    """DTensors: saved by two data ranks at stage 3, and loaded by one."""
    found, saved = {}, {}
    for sizes, stage in ((2, 3), (1, 2)):
        mesh = mesh_of(("dp", sizes), ("tp", 2)) if sizes == 2 else mesh_of(("dp", 1), ("cp", 2), ("tp", 2))
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 2), nn.LayerNorm(2))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        config = zero.Config(timeout=20, stage=stage)
        engine = zero.initialize(model, adamw(model), config, mesh=mesh, data_dims="dp")
        if not saved:
            train_on(engine, model(tokens(0, engine.rank)).square().mean())
            engine.save_pretrained(Path(folder) / "for transformers", dtype=torch.float32)
            engine.save_checkpoint(Path(folder) / "blocks")
        else:
            engine.load_checkpoint(Path(folder) / "blocks")
        mine = {name: local_of(engine.full_master(name)) for name, _ in model.named_parameters()}
        if sizes == 2:
            found |= of_one_place(mesh, mine, Path(folder))
        found[f"stage {stage}"] = not saved or same(mine, saved)
        saved = mine
    return found


@pytest.mark.host  # meshes of gloo's
def test_blocks_of_distributed_parameters(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(RANKS).run(blocks_body, folder=str(tmp_path), limit=60):
        assert all(found.values()), found
    with open_source(tmp_path / "blocks") as source:
        consolidate(source, tmp_path / "weights")
    weights = files.read(tmp_path / "weights")
    assert weights["0.weight"].shape == (4, WIDTH)
    assert files.same(files.read(tmp_path / "for transformers"), weights)
    manifest = Checkpoint(tmp_path / "blocks").manifest
    (weight,) = (entry for entry in manifest.parameters if entry.name == "0.weight")
    assert weight.shape == (4, WIDTH)
    assert {(block.at, block.runs[0]) for block in weight.blocks} == {
        ("[tp=0]", ((0, 2),)),
        ("[tp=1]", ((2, 2),)),
    }
    assert {"model/0.weight[tp=0]", "model/0.weight[tp=1]", "model/3.weight"} < manifest.tensors.keys()


def stages_body(context: Context, folder: str) -> dict[str, bool]:
    """Models of their own in one directory, whose names are partly the same; and copies in another."""
    mesh, found = mesh_of(("pp", 2), ("dp", 2)), {}
    config = zero.Config(timeout=20, local_modules={"*": "pp"})
    saved: dict[str, Tensor] = {}
    for turn in ("save", "load"):
        model = Alike(mesh.get_local_rank("pp"))
        engine = zero.initialize(model, adamw(model), config, mesh=mesh, data_dims="dp")
        if turn == "save":
            train_on(engine, model(tokens(0, engine.rank).to(engine.device)))
            engine.save_checkpoint(Path(folder) / "stages")
            saved = state_of(engine)
        else:
            with torch.no_grad():
                model.get_buffer("shift").zero_()
            engine.load_checkpoint(Path(folder) / "stages")
            found["stages"] = same(state_of(engine), saved)
    found |= whole_and_parts(mesh, Path(folder))
    halves = mesh_of(("dp", 2), ("tp", 2))
    copied = fresh()
    engine = zero.initialize(copied, adamw(copied), zero.Config(timeout=20), mesh=halves, data_dims="dp")
    train_on(engine, language_loss(copied, 0, engine.rank))
    engine.save_checkpoint(Path(folder) / "copies", async_=True)
    engine.wait_for_checkpoint()
    saved = state_of(engine)
    plain = fresh()
    one = zero.initialize(plain, adamw(plain), zero.Config(timeout=20, stage=2))
    one.load_checkpoint(Path(folder) / "copies")
    state = state_of(one)
    found["copies"] = not state or same(state, saved)
    return found


def test_stages_and_copies(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(RANKS).run(stages_body, folder=str(tmp_path), limit=60):
        assert all(found.values()), found
    names = [entry.name for entry in Checkpoint(tmp_path / "stages").manifest.parameters]
    assert {"scale[pp=0]", "scale[pp=1]", "first.layers.layer0_0.weight"} < set(names)
    assert len(set(names)) == len(names)
