"""`accelz bench`: every kernel and copy has figures, collectives have, and what fails is said in one line."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

import accelz
from accelz import AccelzError
from accelz.bench import between_ranks, measure
from accelz.bench.cases import COPY, cases
from accelz.cli import app
from accelz.conformance.cluster import Cluster, ClusterError, Outcome
from accelz.roles import kernels

FEW = ("--elements", "1024", "--rounds", "2")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_each_operation_has_figures() -> None:
    found = json.loads(run("cpu", *FEW, "--json").stdout)
    rows = {(row["kernel"], row["dtypes"]): row for row in found["kernels"]}
    assert {kernel for kernel, _ in rows} - {COPY} <= set(kernels.NAMES)
    assert len(rows) == len(found["kernels"])
    assert rows[COPY, "bytes"]["of_copy"] == 1
    for (kernel, _), row in rows.items():
        assert row["median"] > 0
        assert row["launch"] > 0
        assert row["bytes_per_second"] > 0
        origin = "torch" if kernel == COPY else accelz.use("cpu").kernels.origin(kernel)
        assert row["origin"] == origin
    assert found["collectives"] == []


def test_bytes_are_what_a_call_has_to_move() -> None:
    """Of a step master and moments there and back, the gradient read, the weights written."""
    traffic = {(c.operation, c.dtypes): c.traffic for c in cases(accelz.use("cpu"), 2048)}
    assert traffic["adamw", "bf16 gradient, bf16 weights"] == 3 * 8 + 2 + 2
    assert traffic["adamw", "fp32 gradient"] == 3 * 8 + 4
    assert traffic["sgd", "bf16 gradient, bf16 weights"] == 8 + 2 + 2
    assert traffic["lion", "bf16 gradient, bf16 weights"] == 2 * 8 + 2 + 2
    assert traffic["accumulate", "bf16 into fp32"] == 4 + 2 + 4
    assert traffic["quantise", "bf16 → int8"] == 2 + 1 + 4 / 256


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "sim"])
def test_collectives_between_ranks(name: str) -> None:
    rows = between_ranks.measure(name, ranks=2, rounds=2, sizes=(4096, 8192))
    assert [(row["operation"], row["bytes"]) for row in rows] == [
        (operation, nbytes)
        for nbytes in (4096, 8192)
        for operation in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
    ]
    assert all(row["median"] > 0 and row["of_copy"] > 0 for row in rows)


@pytest.mark.slow
def test_nobody_has_the_device_when_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one process can have a device, this one must not take it."""
    bound: list[int] = []
    monkeypatch.setattr(type(accelz.use("cpu")), "bind", lambda self, local_rank: bound.append(local_rank))
    monkeypatch.setattr(between_ranks, "SIZES", (4096,))
    found = json.loads(run("cpu", *FEW, "--ranks", "2", "--json").stdout)
    assert found["kernels"]
    assert found["collectives"]
    assert bound == []


def test_a_device_of_its_own_has_copies_to_and_from_the_host() -> None:
    pytest.importorskip("accelz_sim")
    shown = run("sim", *FEW)
    assert shown.exit_code == 0, shown.output
    for what in ("copy", "host to device", "device to host", "adamw", "torch reference", "of a copy"):
        assert what in shown.stdout


def test_what_cannot_be_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = run("nothing", *FEW)
    assert missing.exit_code == 2
    assert "nothing" in missing.stderr
    assert "Traceback" not in missing.output

    large = run("cpu", "--elements", "99999999999999")
    assert large.exit_code == 2
    assert "cannot be measured with 99999999999999 elements" in " ".join(large.stderr.split())

    def fail(self: Cluster, *_: object, **__: object) -> None:
        raise ClusterError("body", 2, [Outcome(1, "raised", error="CollectiveError: no link")])

    monkeypatch.setattr(Cluster, "run", fail)
    with pytest.raises(AccelzError, match=r"(?s)2 ranks cannot communicate on 'cpu'.*no link"):
        between_ranks.measure("cpu", 2, 1)


def test_rows_are_medians_over_rounds() -> None:
    described = [measure.Described(COPY, "bytes", 2.0, "torch"), measure.Described("adamw", "x", 4.0, "me")]
    rows = measure.rows(described, 100, [[1.0, 2.0], [2.0, 2.0], [4.0, 40.0]], [0.5, 0.25])
    assert [row["median"] for row in rows] == [2.0, 2.0]
    assert rows[1]["bytes"] == 400
    assert rows[1]["of_copy"] == 1.0  # of 1, 2 and 0.2
    assert rows[1]["launch"] == 0.25
