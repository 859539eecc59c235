"""The programs of examples/ that use a framework, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.accelz import forked
from tests.examples.migrated import CLOSE, losses

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def printed(folder: Path, name: str, *arguments: str) -> list[float]:
    """The last numbers of the lines that a program prints on its own account."""
    place = {"LOCAL_WORLD_SIZE": "2", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = ["--out", str(folder / "out"), *arguments]
    done = forked.job(folder, EXAMPLES / f"{name}.py", command, 2, **place)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(number) for number in re.findall(r"^[a-z].* ([\d.]+)$", done.stdout, re.MULTILINE)]


def test_lora_learns_and_resumes(tmp_path: Path) -> None:
    losses = printed(tmp_path, "lora_finetune", "--steps", "12")
    assert losses[-1] < losses[0]
    assert len(printed(tmp_path, "lora_finetune", "--steps", "14")) == 2
    assert (tmp_path / "out/adapter/adapter_model.safetensors").is_file()


def test_accelerate_and_zero_have_the_same_losses_and_weights(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    old, new = losses(before, "accelerate_before"), losses(after, "accelerate_after")
    assert new[0] == pytest.approx(old[0], abs=CLOSE)
    weights = load_file(after / "model.safetensors")
    for name, value in load_file(before / "model.safetensors").items():
        torch.testing.assert_close(weights[name], value, atol=1e-4, rtol=1e-4)


def test_trainer_learns_and_resumes(tmp_path: Path) -> None:
    (first,) = printed(tmp_path, "trainer_finetune", "--epochs", "1")
    (second,) = printed(tmp_path, "trainer_finetune", "--epochs", "2")
    assert second < first
    assert (tmp_path / "out/weights/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "arguments", "least", "most"),
    [("dpo_sharded_reference", ["--steps", "8"], 0.0, 0.6), ("lightning_classifier", [], 0.8, 1.0)],
)
def test_an_example_learns(
    tmp_path: Path, name: str, arguments: list[str], least: float, most: float
) -> None:
    (number,) = printed(tmp_path, name, *arguments)
    assert least <= number <= most
