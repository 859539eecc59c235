"""What DeepSpeed itself saves, at every stage, and what its ds_to_universal makes of it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.accelz.forked import held_port
from tests.zero.helpers import saved
from zero.consolidate import consolidate, open_source, verify
from zero.consolidate.universal import export_universal
from zero.sources.zero_checkpoint import ZeroSource

RANKS = 2
JOB = "tests.zero.helpers.deepspeed_job"
pytestmark = [
    pytest.mark.host,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: pip install -r benchmarks/requirements-peers.txt",
    ),
    pytest.mark.timeout(600),  # DeepSpeed compiles an extension at its first use
]


@pytest.fixture(
    scope="module",
    params=[(1, "bf16"), (2, "bf16"), (2, "fp32"), (3, "bf16"), (3, "fp32")],
    ids=lambda p: f"stage {p[0]}, {p[1]}",
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a job of DeepSpeed's has saved."""
    stage, dtype = request.param
    path = tmp_path_factory.mktemp(f"stage{stage}{dtype}")
    run_ranks([sys.executable, "-m", JOB, "save", str(path), str(stage), dtype])
    return path


def train_and_save(context: Context, folder: str) -> None:
    """A job of zero's; leaves the whole state beside the checkpoint."""
    from tests.zero.helpers.deepspeed_job import Model, groups_of

    torch.manual_seed(4)
    model = Model()
    engine = zero.initialize(model, torch.optim.AdamW(groups_of(model)), zero.Config(timeout=10))
    for step in range(3):
        engine.backward(engine(torch.arange(step, step + 8).view(2, 4) + context.rank))
        engine.step()
    engine.save_checkpoint(Path(folder) / "checkpoint")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    moments = {name: engine.full_optimizer_state(name) for name in trained}
    weights = engine.state_dict(master=True)
    if context.rank == 0:
        whole = {name: {"fp32": weights[name], **moments[name]} for name in trained}
        torch.save(whole, Path(folder) / "whole.pt")


def run_ranks(command: list[str]) -> None:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with held_port() as held:
        common = os.environ | {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1]), "WORLD_SIZE": str(RANKS),
            "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        ranks = [
            subprocess.Popen(command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **pipes)
            for rank in range(RANKS)
        ]
        try:
            for rank in ranks:
                said, _ = rank.communicate(timeout=500)
                assert rank.returncode == 0, said[-3000:]
        finally:
            for rank in ranks:
                rank.kill()


def test_our_weights_are_those_of_zero_to_fp32(folder: Path, tmp_path: Path) -> None:
    expected = torch.load(folder / "expected.pt", weights_only=True)
    with open_source(folder / "checkpoint") as source:
        assert verify(source) == []
        assert source.facts["world size"] == RANKS
        consolidate(source, tmp_path / "out")
    assert saved.same(saved.read(tmp_path / "out"), expected)


def test_universal_checkpoints_have_the_same_weights(folder: Path, tmp_path: Path) -> None:
    (tag,) = (folder / "checkpoint").glob("global_step*")
    universal = tmp_path / f"{tag.name}_universal"
    tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    options = ["--input_folder", str(tag), "--output_folder", str(universal), "--inject_missing_state"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*tool, *options], check=False, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with open_source(universal) as source:
        assert source.format == "DeepSpeed universal"
        consolidate(source, tmp_path / "out")
    expected = torch.load(folder / "expected.pt", weights_only=True)
    assert saved.same(saved.read(tmp_path / "out"), expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_loads_what_we_export(cluster: Clusters, tmp_path: Path, stage: int) -> None:
    """Masters and moments, bit for bit."""
    cluster(2).run(train_and_save, folder=str(tmp_path))
    with ZeroSource(tmp_path / "checkpoint", optimizer=True) as source:
        export_universal(source, tmp_path / "universal")
    run_ranks([sys.executable, "-m", JOB, "load", str(tmp_path), str(stage), "bf16"])
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    wanted = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert sorted(found) == sorted(wanted)
    for name, state in found.items():
        for key, value in state.items():
            assert torch.equal(value, wanted[name][key]), (name, key)
