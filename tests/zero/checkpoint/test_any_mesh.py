"""One checkpoint for jobs of any arrangement: saved by each, loaded by each, to the bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers import saved as files
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.mesh_layouts import LAYOUTS, RANKS, Job
from zero.cli import app
from zero.consolidate import Options, consolidate, convert, open_source
from zero.consolidate.universal import export_universal
from zero.sources.zero_checkpoint import ZeroSource

pytestmark = pytest.mark.host  # meshes of gloo's


LOADED = ("no mesh", "dp tp", "tp of four", "ep tp", "dp ep", "twice", "pp tp", "parts")
PAIRS = [
    (saved, loaded)
    for number, saved in enumerate(LAYOUTS)
    for other, loaded in enumerate(LOADED)
    if (number + other) % 2 == 0 or saved == loaded
]
"""Each layout is loaded by half of the others, and by itself."""
DCP = ("dp tp", "ep tp", "twice")  # also saved by torch.distributed.checkpoint


def table_body(context: Context, folder: str) -> dict[Any, list[str]]:
    """What differs after a load, for each pair of layouts: saved, loaded."""
    wholes: dict[str, dict[str, Tensor]] = {}
    for seed, (name, layout) in enumerate(LAYOUTS.items()):
        job = Job(layout, seed)
        train_on(job.engine, job.loss())
        job.engine.save_checkpoint(Path(folder) / name)
        wholes[name] = job.wholes()
        if name in DCP:
            masters = {n: job.engine.full_master(n) for n, _, _ in job.named()}
            dcp.save(masters, checkpoint_id=Path(folder) / f"{name} dcp")
        if context.rank == 0:
            torch.save(wholes[name], Path(folder) / f"{name}.pt")
    found = {}
    for name in LOADED:
        job = Job(LAYOUTS[name], 100)
        for saved, expected in wholes.items():
            if (saved, name) in PAIRS:
                job.engine.load_checkpoint(Path(folder) / saved)
                found[saved, name] = job.has(expected)
    return found | pretrained(context, Path(folder), wholes)


def pretrained(context: Context, folder: Path, wholes: dict[str, dict[str, Tensor]]) -> dict[Any, list[str]]:
    """Weights from whole tensors of safetensors, before there is an engine, and into one."""
    for name in ("no mesh", "copies"):
        if context.rank == 0:
            weights = {key: value for key, value in wholes[name].items() if ": " not in key}
            save_file(weights, folder / f"{name}.safetensors")
    dist.barrier()
    job = Job(LAYOUTS["ep tp"], 100, folder / "no mesh.safetensors")
    before = job.has(wholes["no mesh"])
    job.engine.load_pretrained(folder / "copies.safetensors")
    return {"before": before, "into": job.has(wholes["copies"])}


@pytest.fixture(scope="module")
def table(cluster: Clusters, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("layouts")
    return folder, cluster(RANKS).run(table_body, folder=str(folder), limit=120)


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_any_job_loads_what_any_other_has_saved(
    table: tuple[Path, list[Any]], saved: str, loaded: str
) -> None:
    assert [found[saved, loaded] for found in table[1]] == [[]] * RANKS


@pytest.mark.parametrize("way", ["before", "into"])
def test_pretrained_weights_are_divided(table: tuple[Path, list[Any]], way: str) -> None:
    wrong = [[each for each in found[way] if ": " not in each] for found in table[1]]
    assert wrong == [[]] * RANKS


@pytest.mark.parametrize("saved", ["ep tp", "twice", "pp tp", "cp tp"])
def test_tools_see_whole_tensors(table: tuple[Path, list[Any]], saved: str, tmp_path: Path) -> None:
    path = table[0] / saved
    every: dict[str, Tensor] = torch.load(f"{path}.pt")
    weights = {name: value for name, value in every.items() if ": " not in name}
    small = Options(dtype="stored", workers=1, memory=2 * 147_456, verify=True)
    with open_source(path) as source:
        consolidate(source, tmp_path / "weights", small)
        convert(source, tmp_path / "converted")
    found = files.read(tmp_path / "weights")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name].float(), value) for name, value in weights.items())
    with open_source(tmp_path / "converted") as source:
        consolidate(source, tmp_path / "again", small)
    assert files.same(files.read(tmp_path / "again"), found)
    with ZeroSource(path, optimizer=True) as source:
        export_universal(source, tmp_path / "universal")
    (moment,) = (tmp_path / "universal").rglob("layers.1.down/exp_avg.pt")
    assert torch.equal(torch.load(moment)["param"], every["layers.1.down: exp_avg"])
    told = CliRunner().invoke(app, ["inspect", str(path)], env={"COLUMNS": "200"})
    assert re.search(r"layers\.1\.experts +\[3, 4, 5\]", told.output), told.output
    assert re.search(r"divided +\d+ parameters, in up to [24] blocks", told.output), told.output
    assert CliRunner().invoke(app, ["verify", str(path)]).exit_code == 0


@pytest.mark.parametrize("saved", DCP)
def test_torch_checkpoints_of_dtensors_are_read_whole(
    table: tuple[Path, list[Any]], saved: str, tmp_path: Path
) -> None:
    every: dict[str, Tensor] = torch.load(table[0] / f"{saved}.pt")
    with open_source(table[0] / f"{saved} dcp") as source:
        consolidate(source, tmp_path / "out", Options(dtype="stored", workers=1))
    found = files.read(tmp_path / "out")
    assert found.keys() == {n for n in every if ": " not in n and "shift" not in n}
    assert all(torch.equal(value, every[name]) for name, value in found.items())
