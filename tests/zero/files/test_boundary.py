"""Whatever reading raises is an error of zero; what the user's functions raise is theirs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import save_file

import zero
from zero.consolidate import Options, consolidate, open_source
from zero.files.boundary import typed


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (OSError(36, "File name too long"), zero.CheckpointError),
        (MemoryError(), zero.CorruptCheckpointError),
        (RecursionError("deep"), zero.CorruptCheckpointError),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates"), zero.CorruptCheckpointError),
        (OverflowError("x" * 10**6), zero.CorruptCheckpointError),
    ],
)
def test_foreign_errors_become_ours(raised: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^some/file ") as caught, typed(Path("some/file")):
        raise raised
    assert type(caught.value) is kind
    assert len(str(caught.value)) < 1000
    assert caught.value.__cause__ is raised


def test_errors_of_zero_and_interrupts_pass() -> None:
    for raised in (zero.UsageError("as it is"), KeyboardInterrupt()):
        with pytest.raises(type(raised)) as caught, typed(Path("some/file")):
            raise raised
        assert caught.value is raised


@pytest.mark.parametrize("name", ["n" * 300, "a\0b", "a/" * 3000, "\udcff"])
def test_any_path_is_refused_by_a_typed_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(zero.CheckpointError):
        open_source(os.path.join(tmp_path, name))
    with pytest.raises(zero.CheckpointError):
        zero.load_pretrained(torch.nn.Linear(1, 1), os.path.join(tmp_path, name))


def test_an_index_may_name_anything(tmp_path: Path) -> None:
    for name in ("n" * 300, "a\0b", "\ud800"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(zero.CheckpointError):
            zero.load_pretrained(torch.nn.Linear(1, 1), tmp_path)


class Own(Exception):
    """The caller's."""


def fail(*_: object) -> NoReturn:
    raise Own


def test_the_caller_s_errors_are_the_caller_s(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, path)
    with pytest.raises(Own):
        zero.load_pretrained(torch.nn.Linear(2, 2), path, rename=fail)
    with open_source(path) as source, pytest.raises(Own):
        consolidate(source, tmp_path / "out", Options(workers=1), progress=fail)
