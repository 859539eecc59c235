"""The scripts of examples/migration: the same losses before and after."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.examples.migrated import CLOSE, losses

pytestmark = pytest.mark.slow  # starts programs


def test_fsdp2_and_zero_have_the_same_losses_and_weights(tmp_path: Path) -> None:
    before, _ = losses(tmp_path / "before", "fsdp2_before")
    after, _ = losses(tmp_path / "after", "fsdp2_after")
    assert after == pytest.approx(before, abs=CLOSE)
    old, new = (torch.load(tmp_path / name / "weights.pt") for name in ("before", "after"))
    assert new.keys() == old.keys()
    for name, value in old.items():
        torch.testing.assert_close(new[name], value, atol=1e-4, rtol=1e-4)


def test_deepspeeds_script_trains_and_saves(tmp_path: Path) -> None:
    _, rates = losses(tmp_path / "after", "deepspeed_after")
    assert rates[:8] == [0, 0, 0, 0.005, 0.005, 0.007925, 0.007925, 0.01]  # every other one after a step
    assert (tmp_path / "after" / "epoch-2").is_dir()


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_and_zero_have_the_same_losses_and_rates(tmp_path: Path) -> None:
    before, old_rates = losses(tmp_path / "before", "deepspeed_before")
    after, new_rates = losses(tmp_path / "after", "deepspeed_after")
    assert after == pytest.approx(before, abs=CLOSE)
    assert new_rates == old_rates
