"""The benchmark command, made tiny: it runs, reports every peer, and the peers train the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.step import LOSS_BOUND, LossError, check_losses

from accelz.discovery import installed
from tests.benchmarks.command import forked_bench

pytestmark = pytest.mark.slow  # starts programs

PEERS = ("ddp", "fsdp2", "zero3")
SAME_LOSS = 1e-5  # relative: fp32 sums are taken in another order


def test_peers_are_timed_and_agree(tmp_path: Path) -> None:
    out, tables = tmp_path / "step.json", tmp_path / "step.md"
    flags = (
        "--size tiny --precision fp32 --ranks 2 --rounds 9 --within 0.001 --steps 1 --batch 1 --length 16 "
        "--no-memory"
    )
    files = ("--json", str(out), "--markdown", str(tables))
    done = forked_bench(tmp_path, "step", *flags.split(), "--peers", ",".join(PEERS), *files)
    assert done.returncode == 0, done.stderr

    report: dict[str, Any] = json.loads(out.read_text())
    assert report["versions"]["torch"]
    assert report["machine"]["cores"] >= 1
    (result,) = report["results"]
    rows = {row["peer"]: row for row in result["rows"]}
    assert tuple(rows) == PEERS
    for name, row in rows.items():
        assert 0 < row["min"] <= row["median"] <= row["max"]
        assert len(row["rounds"]) == 1
        assert row["losses"] == pytest.approx(rows["ddp"]["losses"], rel=SAME_LOSS), name
        assert f"| {name} |" in tables.read_text()
        assert name in done.stdout
    assert rows["ddp"]["first_loss"] != rows["ddp"]["last_loss"]
    assert rows["fsdp2"]["to_fsdp2"] == 1.0
    assert rows["zero3"]["moved_bytes"] >= 2.5 * 4 * result["settings"]["parameters"], "gathered, reduced"


def test_peers_whose_losses_part_get_no_table() -> None:
    check_losses({"ddp": [9.0, 8.0], "zero3": [9.0, 8.0 * (1 + 0.9 * LOSS_BOUND)]})
    with pytest.raises(LossError, match=r"in step 1 the losses are ddp 8\.00000, zero3 8\.16000"):
        check_losses({"ddp": [9.0, 8.0], "zero3": [9.0, 8.16]})
    with pytest.raises(LossError, match="step 0"):
        check_losses({"ddp": [9.0], "zero3": [float("nan")]})


def test_a_device_of_its_own_memory_counts_it(tmp_path: Path) -> None:
    """The model is made on the device, alike for all; the peaks are those of the turns."""
    if not installed("sim"):
        pytest.skip("accelz-sim is not installed")
    out = tmp_path / "step.json"
    flags = "--device sim --size tiny --precision fp32 --ranks 1 --rounds 1 --steps 1 --batch 1 --length 16"
    peers = ("--peers", "plain,fsdp2-host")
    done = forked_bench(tmp_path, "step", *flags.split(), *peers, "--no-memory", "--json", str(out))
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(out.read_text())["results"]
    plain, host = result["rows"]
    assert host["losses"] == pytest.approx(plain["losses"], rel=SAME_LOSS)
    state = 16 * result["settings"]["parameters"]  # weights, gradients, two moments
    assert plain["rank_bytes"] > state > host["rank_bytes"]
    assert plain["node_bytes"] == plain["rank_bytes"]


def test_an_unknown_peer_is_refused(tmp_path: Path) -> None:
    done = forked_bench(tmp_path, "step", "--peers", "ddp,zero9")
    assert done.returncode == 2
    assert "zero9" in done.stderr
