"""DeepSpeed's checkpoints without DeepSpeed: every stage and layout, and nothing in them is ever run."""

from __future__ import annotations

import argparse
import copy
import datetime
import os
import pickle
import zipfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch

import zero
from tests.zero.helpers import saved
from tests.zero.helpers.bomb import Bomb
from tests.zero.helpers.deepspeed_layout import (
    Layout,
    Model,
    model_states,
    optimizer_states,
    pickled_as_deepspeed,
    save,
)
from zero.consolidate import Options, consolidate, open_source, verify
from zero.sources.crc import combine

SMALL = Options(workers=3, memory=3 * 147_456)


@pytest.fixture(scope="module")
def model() -> Model:
    """Sizes that no number of ranks divides, and one larger than a chunk."""
    torch.manual_seed(2)
    matrices = {"embedding.weight": torch.randn(29, 13), "layer.weight": torch.randn(301, 101)}
    vectors = {"layer.bias": torch.randn(101), "scale": torch.randn(1), "norm.weight": torch.randn(13)}
    frozen = {"old.weight": torch.randn(7, 5).bfloat16(), "old.turned": torch.randn(6, 4).bfloat16().t()}
    buffers = {"shift": torch.linspace(-1, 1, 13), "count": torch.tensor(7)}
    buffers |= {"mask": torch.arange(50).expand(40, 50), "gaps": torch.randn(30, 80)[:, 1:70:2]}
    return Model([matrices, vectors], frozen, buffers, {"head.weight": "embedding.weight"})


def read(path: Path, out: Path, options: Options = SMALL) -> saved.State:
    with open_source(path) as source:
        consolidate(source, out, options)
    return saved.read(out)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(stage=3, ranks=1),
        Layout(stage=3, ranks=2),
        Layout(stage=3, ranks=5, sub_group=150),
        Layout(stage=3, ranks=4, prefix="", dtype=torch.float32, sub_group=1),
        Layout(stage=2, ranks=1),
        Layout(stage=2, ranks=3),
        Layout(stage=2, ranks=2, gap=3),
        Layout(stage=1, ranks=4, prefix="", dtype=torch.float16),
        Layout(stage=1, ranks=2, named_stage=False),
    ],
    ids=str,
)
def test_masters_frozen_tied_and_buffers(tmp_path: Path, model: Model, layout: Layout) -> None:
    tag = save(tmp_path / "checkpoint", model, layout)
    found = read(tmp_path / "checkpoint", tmp_path / "out")
    assert saved.same(found, model.expected())
    kept = read(tag, tmp_path / "kept", Options(dtype="keep"))
    assert kept["layer.weight"].dtype == layout.dtype
    assert torch.equal(kept["layer.weight"], model.masters["layer.weight"].to(layout.dtype))
    assert torch.equal(kept["old.turned"], model.frozen["old.turned"].to(kept["old.turned"].dtype))
    with open_source(tag) as source:
        assert verify(source) == []
        assert source.facts["world size"] == layout.ranks
        assert source.facts["steps"] == 3
        assert {t.name: t.kind for t in source.tensors}["old.weight"] == "frozen"


def test_frozen_parameters_that_only_the_module_has(tmp_path: Path, model: Model) -> None:
    """As BF16_Optimizer saves them: there are no frozen_param_shapes."""
    tag = save(tmp_path / "checkpoint", model, Layout(stage=2))
    path = tag / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=True)
    torch.save(content | {"frozen_param_shapes": None, "frozen_param_fragments": None}, path)
    assert saved.same(read(tag, tmp_path / "out"), model.expected())


@pytest.mark.parametrize("place", ["optimizer", "model"])
def test_code_in_a_pickle_is_refused_by_name_and_not_run(tmp_path: Path, model: Model, place: str) -> None:
    tag = save(tmp_path / "checkpoint", model, Layout(stage=2))
    names = {
        "optimizer": "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "model": "mp_rank_00_model_states.pt",
    }
    torch.save({"module": Bomb(tmp_path / "harm")}, tag / names[place])
    with pytest.raises(zero.CheckpointError, match=rf"{names[place]}.*posix\.mkdir"):
        open_source(tag)
    assert not (tmp_path / "harm").exists()


class Odd(list[int]):
    """A class that only the job knows, with items, attributes and a state."""


def client_state(harm: Path) -> dict[str, Any]:
    """What jobs keep in the files of model states, beside DeepSpeed's own."""
    odd = Odd([1, 2])
    odd.label = torch.ones(3)  # type: ignore[attr-defined]
    return {
        "args": argparse.Namespace(lr=0.1, path=Path("runs/a"), shape=torch.Size([2, 3])),
        "numpy": np.random.get_state(),
        "loss": np.float64(0.5),
        "counts": defaultdict(list, {"a": [1], "b": [2, 3]}),
        "when": datetime.datetime(2026, 5, 4, tzinfo=datetime.UTC),
        "odd": {"things": [odd, {odd.__class__}, deque([1, 2])], "kind": Odd},
        "bomb": Bomb(harm),
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_what_jobs_keep_in_the_files_is_passed_by(tmp_path: Path, model: Model, stage: int) -> None:
    tag = save(tmp_path / "checkpoint", model, Layout(stage=stage))
    for path in tag.glob("*model_states.pt"):
        torch.save(torch.load(path, weights_only=False) | client_state(tmp_path / "harm"), path)
    for path in tag.glob("*optim_states.pt"):  # schedulers leave learning rates of any type
        with pickled_as_deepspeed():
            content = torch.load(path, weights_only=False)
            content["optimizer_state_dict"] |= client_state(tmp_path / "harm")
            torch.save(content, path)
    assert saved.same(read(tag, tmp_path / "out"), model.expected())
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("key", ["module", "param_shapes", "frozen_param_shapes"])
def test_weights_inside_objects_of_the_jobs_are_not_missed(tmp_path: Path, model: Model, key: str) -> None:
    tag = save(tmp_path / "checkpoint", model, Layout(stage=2))
    (path,) = tag.glob("*model_states.pt")
    content = torch.load(path, weights_only=False)
    held = Odd()
    held.weight = torch.ones(3)  # type: ignore[attr-defined]
    content[key] = {**content[key], "odd": held} if isinstance(content[key], dict) else [held]
    torch.save(content, path)
    with pytest.raises(zero.CheckpointError, match=r"objects that are not read.*Odd"):
        open_source(tag)


def test_a_pickle_that_is_no_zip_is_refused(tmp_path: Path, model: Model) -> None:
    tag = save(tmp_path / "checkpoint", model, Layout(stage=2))
    path = tag / "mp_rank_00_model_states.pt"
    path.write_bytes(pickle.dumps(Bomb(tmp_path / "harm")))
    with pytest.raises(zero.CorruptCheckpointError, match=path.name):
        open_source(tag)
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(zero.CorruptCheckpointError, match=r"before 1\.6"):
        open_source(tag)
    assert not (tmp_path / "harm").exists()


def test_compressed_records_are_refused(tmp_path: Path, model: Model) -> None:
    """What inflates to any size is not even opened."""
    tag = save(tmp_path / "checkpoint", model, Layout(stage=2))
    path = tag / "mp_rank_00_model_states.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(10**7))
    with pytest.raises(zero.CorruptCheckpointError, match="is compressed"):
        open_source(tag)


def test_flipped_bits_are_found_by_the_zip_checksum(tmp_path: Path, model: Model) -> None:
    tag = save(tmp_path / "checkpoint", model, Layout(stage=3))
    path = tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    at = data.find(model.masters["layer.weight"].flatten()[-50:].numpy().tobytes())
    assert at > 0
    data[at + 17] ^= 32
    path.write_bytes(data)
    with open_source(tag) as source:
        with pytest.raises(zero.CorruptCheckpointError, match=rf"{path.name} is damaged.*'layer\.weight'"):
            consolidate(source, tmp_path / "out", SMALL)
        (problem,) = verify(source)
        assert path.name in problem
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint"]


def test_files_without_checksums_are_read_and_said_to_have_none(tmp_path: Path, model: Model) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        tag = save(tmp_path / "checkpoint", model, Layout(stage=3))
    finally:
        torch.serialization.set_crc32_options(True)
    with open_source(tag) as source:
        assert source.facts["checksums"] == "none"
    assert saved.same(read(tag, tmp_path / "out"), model.expected())


def remove(name: str) -> Callable[[Path], None]:
    return lambda tag: (tag / name).unlink()


def duplicate(name: str, new: str) -> Callable[[Path], None]:
    return lambda tag: (tag / new).write_bytes((tag / name).read_bytes()) and None  # type: ignore[func-returns-value]


def cut(name: str) -> Callable[[Path], None]:
    return lambda tag: os.truncate(tag / name, (tag / name).stat().st_size - 100)


OPTIMIZER = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt".format
MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt".format


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove(OPTIMIZER(1)), "the optimizer states of rank 1 are missing"),
        (remove(OPTIMIZER(2)), "model-state files for 2 ranks|was saved by 3 ranks"),
        (remove(MODEL(1)), "the model states of rank 1 are missing"),
        (remove(MODEL(2)), "2 model-state files for 3 ranks"),
        (cut(OPTIMIZER(1)), "is truncated"),
        (cut(MODEL(0)), "is truncated"),
        (duplicate(OPTIMIZER(0), OPTIMIZER(0)[5:]), "two files of rank 0"),
        (duplicate(OPTIMIZER(0), OPTIMIZER(0).replace("mp_rank_00", "mp_rank_01")), "model-parallel"),
        (duplicate(MODEL(0), "layer_0_expert_0_mp_rank_00_model_states.pt"), "experts"),
        (duplicate(MODEL(0), OPTIMIZER(0)), "no flat groups of optimizer states"),
        (duplicate(OPTIMIZER(0), MODEL(0)), "param_shapes"),
    ],
)
def test_what_is_not_complete_is_named(
    tmp_path: Path, model: Model, change: Callable[[Path], None], message: str
) -> None:
    tag = save(tmp_path / "checkpoint", model, Layout(stage=3, ranks=3))
    change(tag)
    with pytest.raises(zero.CheckpointError, match=message):
        open_source(tag)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every value in nested containers."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["optim_states", "model_states"])
def test_anything_anywhere_is_an_error_or_harmless(
    tmp_path: Path, model: Model, stage: int, kind: str
) -> None:
    tag = save(tmp_path / "checkpoint", model, Layout(stage=stage, ranks=1))
    (path,) = tag.glob(f"*{kind}.pt")
    layout = Layout(stage=stage, ranks=1)
    if kind == "optim_states":
        original = optimizer_states(model.groups, layout, 0)
    else:
        original = model_states(model, model.groups, layout, 0)
    junk = (None, "text", -1, [1], {"a": 1}, torch.Size([-5, 3]), torch.Size([1 << 40, 1 << 40]))
    refused = 0
    for number, place in enumerate(places(original)):
        content = copy.deepcopy(original)
        inner = content
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = junk[number % len(junk)]
        with pickled_as_deepspeed():
            torch.save(content, path)
        try:
            with open_source(tag) as source:
                every = range(len(source.tensors))
                assert all(chunk.nbytes <= 1000 for chunk in source.chunks(every, 1000))
        except zero.ZeroError:
            refused += 1
    assert refused > 5


def test_files_of_two_saves_are_not_mixed(tmp_path: Path, model: Model) -> None:
    tag = save(tmp_path / "checkpoint", model, Layout())
    later = save(tmp_path / "later", model, Layout(step=4))
    (tag / OPTIMIZER(1)).write_bytes((later / OPTIMIZER(1)).read_bytes())
    with pytest.raises(zero.CheckpointError, match=r"rank_1.*is from step 4\.0 and .* from step 3\.0"):
        open_source(tag)


def test_masters_that_do_not_fit_the_names_are_refused(tmp_path: Path, model: Model) -> None:
    for stage in (2, 3):
        tag = save(tmp_path / f"stage{stage}", model, Layout(stage=stage))
        groups = [dict(model.groups[0]), dict(model.groups[1])]
        groups[0]["embedding.weight"] = torch.randn(29, 200)
        other = save(tmp_path / f"other{stage}", replace(model, groups=groups), Layout(stage=stage))
        for path in other.glob("*model_states.pt"):
            (tag / path.name).write_bytes(path.read_bytes())
        with pytest.raises(zero.CorruptCheckpointError, match="masters"):
            open_source(tag)


@pytest.mark.parametrize("latest", ["../checkpoint2", "/etc", "global_step4", ".."])
def test_latest_names_a_directory_beside_it(tmp_path: Path, model: Model, latest: str) -> None:
    save(tmp_path / "checkpoint", model, Layout())
    save(tmp_path / "checkpoint2", model, Layout())
    (tmp_path / "checkpoint" / "latest").write_text(latest)
    with pytest.raises(zero.CheckpointError, match="latest"):
        open_source(tmp_path / "checkpoint")


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (1, 1), (1000, 70_000), (3, 1 << 20)])
def test_checksums_of_pieces_combine(sizes: tuple[int, int]) -> None:
    first, second = (os.urandom(size) for size in sizes)
    assert combine(crc32(first), crc32(second), len(second)) == crc32(first + second)


@pytest.mark.timeout(20)
def test_a_rank_s_number_is_no_count(tmp_path: Path) -> None:
    tag = save(tmp_path / "checkpoint", Model([{"w": torch.ones(3)}]), Layout())
    last = sorted(tag.glob("*optim_states.pt"))[-1]
    last.rename(last.with_name(last.name.replace("rank_1", f"rank_{10**15}")))
    with pytest.raises(zero.CheckpointError, match="rank 1 are missing"):
        open_source(tmp_path / "checkpoint")
