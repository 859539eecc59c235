"""Frozen weights of torchao and bitsandbytes: the bits of an unsharded model, wherever they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.frameworks import quantised_runs as runs
from tests.frameworks.quantised_table import written

KINDS = list(runs.MADE)
COMPILED = [kind for kind in KINDS if kind not in runs.OTHER_STORAGE]


def wheres(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "stage 1": {"stage": 1},
        "stage 3": {"stage": 3},
        "host": {"offload": zero.Offload(params="host", optimizer="host")},
        "disk": {"offload": zero.Offload(params="disk", optimizer="disk", path=folder)},
        "compiled": {"compile": zero.Compile(inner="aot_eager")},
        "bf16, coded": {"precision": "bf16", "gather_dtype": "int8"},
    }


@pytest.fixture(scope="module")
def wanted(cluster: Clusters) -> dict[str, dict[str, Any]]:
    return dict(cluster(1).run(runs.unsharded, kinds=KINDS)[0])


@pytest.mark.parametrize("where", wheres(Path()))
def test_they_train_adapters_as_unsharded(
    cluster: Clusters, tmp_path: Path, wanted: dict[str, dict[str, Any]], where: str
) -> None:
    saved, settings = tmp_path / "saved", wheres(tmp_path)[where]
    kinds = COMPILED if where == "compiled" else KINDS
    for rank, found in enumerate(
        cluster(2).run(runs.trained, kinds=kinds, folder=str(saved), **settings, limit=120)
    ):
        for kind in kinds:
            assert found[kind]["kept"], kind
            tolerance = 1e-6 if "bf16" not in where else 0.05
            assert found[kind]["losses"] == pytest.approx(wanted[kind]["losses"], abs=tolerance), kind
            if rank == 0 and tolerance < 0.01:
                state = found[kind]["state"]
                for name in (name for name in wanted[kind]["state"] if ".up." in name or ".down." in name):
                    assert torch.allclose(state[name], wanted[kind]["state"][name], atol=1e-5), name
    if where == "stage 3":
        for ranks in (1, 3):
            for each in cluster(ranks).run(runs.loaded, kinds=KINDS, folder=str(saved), limit=120):
                assert each == dict.fromkeys(KINDS, (True, True))


def test_adapters_of_peft_train_and_are_saved_whole(cluster: Clusters) -> None:
    kinds = [
        "torchao Int8WeightOnlyConfig",
        "bitsandbytes Linear4bit, nf4 in uint8",
        "bitsandbytes Linear4bit, nf4 in bfloat16",
        "bitsandbytes Linear8bitLt",
    ]
    wanted = cluster(1).run(runs.qlora, kinds=kinds, sharded=False)[0]
    found = cluster(2).run(runs.qlora, kinds=kinds, sharded=True)
    for kind in kinds:
        assert found[1][kind]["losses"] == found[0][kind]["losses"]
        assert found[0][kind]["losses"] == pytest.approx(wanted[kind]["losses"], abs=1e-6), kind
        saved, whole = found[0][kind]["saved"], wanted[kind]["saved"]
        assert saved.keys() == whole.keys()
        assert len(saved) == 6
        for name, value in whole.items():
            torch.testing.assert_close(saved[name], value, atol=1e-5, rtol=0)


def test_plans_know_their_bytes() -> None:
    for kind in KINDS:
        model = runs.built(kind)
        plan = zero.plan(model, runs.adapters(model), zero.Config(), ranks=2)
        planned = sum(g.own_bytes for unit in plan.units for g in unit.groups if not g.trainable)
        nbytes = sum(packed.numel() for packed in runs.bits(model).values())
        assert nbytes <= planned <= nbytes + 4096, kind  # padded


def test_docs_have_what_lies_inside_each_type() -> None:
    for page, text in written().items():
        assert page.read_text() == text, "run python -m tests.frameworks.quantised_table"


def other_format(context: Context, folder: str) -> None:
    first = runs.built("bitsandbytes Linear4bit, nf4 in uint8")
    engine = zero.initialize(first, runs.adapters(first), zero.Config(timeout=30))
    engine.save_checkpoint(folder)
    runs.MADE["fp4"] = runs._4bit("fp4", torch.uint8, nested=True)
    second = runs.built("fp4")
    engine = zero.initialize(second, runs.adapters(second), zero.Config(timeout=30))
    with pytest.raises(
        zero.StateError, match=r"'0\.base\.weight' was saved as .* nf4 of .* is now .* fp4 of"
    ):
        engine.load_checkpoint(folder)


def test_values_of_another_format_are_refused(cluster: Clusters, tmp_path: Path) -> None:
    cluster(2).run(other_format, folder=str(tmp_path / "saved"))


def test_weights_that_are_not_packed_yet_are_refused() -> None:
    layer = bitsandbytes.nn.Linear4bit(16, 16)
    with zero.init():
        born = bitsandbytes.nn.Linear4bit(16, 512)
    for each in (layer, born):
        with pytest.raises(zero.ModelError, match="Params4bit that are not packed yet"):
            zero.initialize(each, torch.optim.SGD(each.parameters()))
