"""Checkpoints are checked in full before a load changes anything, and a good one repairs a failed load."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.counting import CountingStorage
from tests.zero.helpers.fingerprint import fingerprint
from tests.zero.helpers.resumed_job import Job
from tests.zero.helpers.saving import save_body
from tests.zero.helpers.told import raised
from zero.files.manifest import MANIFEST, seal, unseal
from zero.files.storage import DISK

Manifest = dict[str, Any]


def damaged_body(context: Context, good: str, bad: str) -> dict[str, Any]:
    job = Job(context, "adamw", fresh=False, stage=3)
    before = fingerprint(job.engine)
    found: dict[str, Any] = {}
    for name, path in {"cut": bad + "-cut", "flipped": bad}.items():
        try:
            job.load(path)
        except zero.CorruptCheckpointError as error:
            found[name] = str(error)
        job.engine._integrity.interrupted = False  # else nothing can be read
        found[f"{name}: unchanged"] = fingerprint(job.engine) == before
        job.engine._integrity.interrupt()
    found["train"] = raised(lambda: job.train(1))
    found["save"] = raised(lambda: job.save(good + "-again"))
    found["state"] = raised(job.engine.state_dict)
    job.engine.load_checkpoint(good, weights_only=True)
    found["only the weights"] = raised(lambda: job.train(1))
    job.load(good)
    job.train(1)
    found["steps"] = job.engine.steps
    return found


def test_a_damaged_checkpoint_is_named_on_every_rank_and_never_used(
    cluster: Clusters, tmp_path: Path
) -> None:
    good, bad, cut = (tmp_path / name for name in ("good", "bad", "bad-cut"))
    for path in (good, bad, cut):
        cluster(2).run(save_body, path=str(path), stage=3)
    file = bad / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    file = cut / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for found in cluster(2).run(damaged_body, good=str(good), bad=str(bad)):
        assert "bad/rank-00001.safetensors is damaged: the checksum of '" in found["flipped"]
        assert "bad-cut/rank-00001.safetensors has" in found["cut"]
        assert found["cut: unchanged"]
        assert "interrupted" in found["train"]
        assert "interrupted" in found["save"]
        assert "interrupted" in found["state"]
        assert "interrupted" in found["only the weights"]
        assert found["steps"] == 4


def _first_state(manifest: Manifest, key: str) -> str:
    return next(name for name in manifest["tensors"] if name.startswith(f"optimizer/{key}/blocks"))


def _set_option(name: str, value: Any) -> Callable[[Manifest], None]:
    return lambda m: m["optimizer"]["param_groups"][0].update({name: value})


def _lend_tensor(*place: str) -> Callable[[Manifest], None]:
    """Let a random state of rank 0 be a parameter's values."""

    def change(manifest: Manifest) -> None:
        found = manifest["ranks"][0]["rng"]
        for key in place:
            found = found[key]
        found["$tensor"] = "model/embedding.weight"

    return change


def _set_tensor(key: str, member: str, value: Callable[[Any], Any]) -> Callable[[Manifest], None]:
    def change(manifest: Manifest) -> None:
        tensor = manifest["tensors"][_first_state(manifest, key)]
        tensor[member] = value(tensor[member])

    return change


EDITED: dict[str, tuple[Callable[[Manifest], None], str]] = {
    "lr of text": (_set_option("lr", "x"), r"param_groups\[0\]: lr is 'x' instead of float"),
    "lr of nothing": (_set_option("lr", None), "lr is None instead of float"),
    "one beta": (_set_option("betas", {"$tuple": [0.9]}), r"betas is \(0.9,\) instead of tuple of float"),
    "a beta of text": (_set_option("betas", {"$tuple": [0.9, "x"]}), r"betas is \(0.9, 'x'\) instead"),
    "lr of many": (_set_option("lr", {"$tensor": "model/norm.weight"}), r"lr is Tensor of shape \(12,\)"),
    "an option of no kernel": (_set_option("amsgrad", True), "amsgrad=True was set"),
    "another shape": (
        _set_tensor("exp_avg", "shape", lambda shape: [*shape, 1]),
        "with different optimizer state: blocks",
    ),
    "no numbers": (
        _set_tensor("exp_avg", "dtype", lambda _: "I32"),
        "with different optimizer state: blocks",
    ),
    "many steps": (
        lambda m: m["tensors"].update({_first_state(m, "step"): m["tensors"][_first_state(m, "exp_avg")]}),
        "with different optimizer state: blocks",
    ),
    "values for a kernel": (
        lambda m: next(p for p in m["parameters"] if p["state"])["values"].update(x=1),
        "with different optimizer state: blocks",
    ),
    "torch's generator": (_lend_tensor("torch"), "the checkpoint's random state cannot be restored"),
    "python's generator": (_lend_tensor("python", "internal"), "the checkpoint's random state cannot"),
    "numpy's generator": (_lend_tensor("numpy", "keys"), "the checkpoint's random state cannot be restored"),
    "a generator's position": (
        lambda m: m["ranks"][1]["rng"]["numpy"].update(kind="PCG64"),
        "the checkpoint's random state cannot",
    ),
    "parameters among options": (_set_option("params", []), "a param_group has 'params'"),
}


def _cases(optimizer: str) -> dict[str, tuple[Callable[[Manifest], None], str]]:
    return {name: case for name, case in EDITED.items() if optimizer == "adamw" or "kernel" not in name}


def edited_body(context: Context, runs: str, optimizer: str, stage: int) -> dict[str, Any]:
    job = Job(context, optimizer, fresh=False, stage=stage)
    job.load(str(Path(runs, "good")))
    before, random_state = fingerprint(job.engine), torch.get_rng_state()
    options = [{k: v for k, v in g.items() if k != "params"} for g in job.engine.optimizer.param_groups]
    found = {}
    for number, name in enumerate(EDITED):
        if name not in _cases(optimizer):
            continue
        found[name] = raised(lambda number=number: job.load(str(Path(runs, f"edited-{number}"))))
        assert torch.equal(torch.get_rng_state(), random_state), name
    assert fingerprint(job.engine) == before  # of all of them
    now = [{k: v for k, v in g.items() if k != "params"} for g in job.engine.optimizer.param_groups]
    losses = job.train(2)
    job.load(str(Path(runs, "good")))
    return {"told": found, "options": options == now, "same": job.train(2) == losses}


@pytest.mark.parametrize(
    ("optimizer", "stage"), [("adamw", 3), pytest.param("adamax", 0, marks=pytest.mark.host)]
)
def test_everything_is_checked_before_anything_changes(
    cluster: Clusters, tmp_path: Path, optimizer: str, stage: int
) -> None:
    """Manifests that were changed on purpose, with checksums that match."""
    good = tmp_path / "good"
    cluster(2).run(save_body, path=str(good), optimizer=optimizer, stage=stage)
    for number, (change, _) in enumerate(EDITED.values()):
        path = tmp_path / f"edited-{number}"
        shutil.copytree(good, path)
        manifest = json.loads(unseal("zero-checkpoint", (path / MANIFEST).read_bytes()))
        change(manifest)
        (path / MANIFEST).write_bytes(seal("zero-checkpoint", manifest))
    for found in cluster(2).run(edited_body, runs=str(tmp_path), optimizer=optimizer, stage=stage):
        for name, (_, expected) in _cases(optimizer).items():
            assert re.search(expected, found["told"][name]), (name, found["told"][name])
        assert found["options"]
        assert found["same"]


class Failing(CountingStorage):
    """Fails at its n-th read."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.left = last
        self.on_read = self._count

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.EIO, "injected")


def repaired_body(context: Context, good: str, optimizer: str) -> list[str]:
    job = Job(context, optimizer, fresh=False, stage=3)
    job.load(good)
    before = fingerprint(job.engine)
    said, last = [], 1
    while not said or said[-1] != "nothing raised":
        job.engine._checkpoints.storage = Failing(last if context.rank == 1 else 0)
        said.append(raised(lambda: job.load(good)))
        job.engine._checkpoints.storage = DISK
        job.load(good)
        assert fingerprint(job.engine) == before, last
        last += 1 + last // 2
    return said


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sign", marks=pytest.mark.host)])
def test_a_load_that_failed_anywhere_is_repaired_by_a_good_one(
    cluster: Clusters, tmp_path: Path, optimizer: str
) -> None:
    good = str(tmp_path / "good")
    cluster(2).run(save_body, path=good, optimizer=optimizer, stage=3)
    for said in cluster(2).run(repaired_body, good=good, optimizer=optimizer):
        assert len(said) > 5
        assert all("injected" in each for each in said[:-1])
