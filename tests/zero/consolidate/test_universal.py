"""Checkpoints of zero's written as DeepSpeed universal ones, and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers import saved
from tests.zero.helpers.models import LanguageModel, tokens
from tests.zero.helpers.training import adamw
from zero.consolidate import Options, consolidate, open_source, verify
from zero.consolidate.universal import export_universal
from zero.files.manifest import LossScaleEntry
from zero.sources.zero_checkpoint import ZeroSource

pytestmark = pytest.mark.host

TAG = "global_step3_universal"


def train_and_save(context: Context, folder: str) -> None:
    """Rank 0 leaves the whole state beside the checkpoint."""
    torch.manual_seed(3)
    model = LanguageModel()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    engine = zero.initialize(model, optimizer, zero.Config(precision="bf16", timeout=10))
    for step in range(3):
        engine.backward(model(tokens(step, context.rank, model))["loss"])
        engine.step()
        scheduler.step()
    engine.save_checkpoint(Path(folder) / "checkpoint", {"scheduler": scheduler, "note": 7})
    trained = [n for n, p in model.named_parameters() if p.requires_grad and p.numel()]
    moments = {n: {k: v.cpu() for k, v in engine.full_optimizer_state(n).items()} for n in trained}
    state = engine.state_dict(master=True)
    if context.rank == 0:
        torch.save({"state": state, "moments": moments}, Path(folder) / "whole.pt")


@pytest.fixture(scope="module")
def folder(cluster: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("universal")
    cluster(2).run(train_and_save, folder=str(path))
    with ZeroSource(path / "checkpoint", optimizer=True) as source:
        export_universal(source, path / "universal", Options(verify=True))
    return path


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_every_file_holds_what_deepspeed_looks_for(folder: Path) -> None:
    whole = load(folder / "whole.pt")
    universal = folder / "universal"
    assert (universal / "latest_universal").read_text() == TAG
    masters = universal / TAG / "zero"
    trained: dict[str, dict[str, Tensor]] = whole["moments"]
    assert sorted(p.name for p in masters.iterdir() if p.is_dir()) == sorted([*trained, "empty"])
    for name, moments in trained.items():
        assert torch.equal(load(masters / name / "fp32.pt")["param"], whole["state"][name].float())
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(load(masters / name / f"{key}.pt")["param"], moments[key]), name
        assert load(masters / name / "step.pt") == 3.0
        assert sorted(p.name for p in (masters / name).iterdir()) == [
            "exp_avg.pt", "exp_avg_sq.pt", "fp32.pt", "step.pt",
        ]  # fmt: skip
    common = load(masters / "optimizer_state.pt")
    assert [g["weight_decay"] for g in common["param_groups"]] == [0.1, 0.0]
    assert common["optimizer_state_dict"]["state"][0]["step"] == 3.0
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        states = load(universal / TAG / name)
        assert (states["global_steps"], states["dp_world_size"], states["mp_world_size"]) == (3, 2, 1)
        assert states["lr_scheduler"]["last_epoch"] == 3
        assert states["zero_state"]["note"] == 7


def test_our_own_reader_gives_the_same_weights(folder: Path, tmp_path: Path) -> None:
    with open_source(folder / "universal") as source:
        assert source.format == "DeepSpeed universal"
        assert verify(source) == []
        consolidate(source, tmp_path / "from-universal")
    with open_source(folder / "checkpoint") as source:
        consolidate(source, tmp_path / "from-zero")
    wanted = saved.read(tmp_path / "from-zero")
    assert "head.weight" in wanted
    assert saved.same(saved.read(tmp_path / "from-universal"), wanted)


def test_patterns_take_the_optimizer_state_along(folder: Path, tmp_path: Path) -> None:
    with ZeroSource(folder / "checkpoint", optimizer=True) as source:
        export_universal(source, tmp_path / "out", Options(include=("blocks.0.*",)))
    names = sorted(p.name for p in (tmp_path / "out" / TAG / "zero").iterdir() if p.is_dir())
    assert names
    assert all(name.startswith("blocks.0.") for name in names)
    assert (tmp_path / "out" / TAG / "zero" / "blocks.0.up.weight" / "exp_avg.pt").exists()


def test_skipped_steps_are_counted_on(folder: Path, tmp_path: Path) -> None:
    with ZeroSource(folder / "checkpoint", optimizer=True) as source:
        manifest = source.checkpoint.manifest
        scale = LossScaleEntry(scale=8.0, good_steps=1.0, skipped_steps=2)
        source.checkpoint.manifest = manifest.model_copy(update={"loss_scale": scale})
        export_universal(source, tmp_path / "out")
    states = load(tmp_path / "out" / TAG / "mp_rank_00_model_states.pt")
    assert (states["global_steps"], states["skipped_steps"]) == (3, 2)


def test_names_that_are_no_directories_are_refused(tmp_path: Path) -> None:
    from tests.zero.helpers import synthetic

    synthetic.save(tmp_path / "checkpoint", {"../harm": torch.ones(3)})
    with (
        ZeroSource(tmp_path / "checkpoint", optimizer=True) as source,
        pytest.raises(zero.CheckpointError, match="cannot be the name of a parameter here"),
    ):
        export_universal(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "latest"]


def test_the_default_device_does_not_matter(folder: Path, tmp_path: Path) -> None:
    """What is written is the same, byte for byte, where a script has set another one."""
    for name, default in (("default", "cpu"), ("meta", "meta")):
        (tmp_path / name).mkdir()
        with torch.device(default), ZeroSource(folder / "checkpoint", optimizer=True) as source:
            export_universal(source, tmp_path / name / "universal", Options(verify=True))
            for format in ("torch", "safetensors"):
                consolidate(source, tmp_path / name / format, Options(format=format, verify=True))
    files = [path for path in (tmp_path / "default").rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        name = str(path.relative_to(tmp_path / "default"))
        assert path.read_bytes() == (tmp_path / "meta" / name).read_bytes(), name
