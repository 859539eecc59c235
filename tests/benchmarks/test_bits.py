"""What the comparison of bits says of runs. `tests/scripts/test_device_check.py` runs it, made tiny."""

from __future__ import annotations

import struct

import pytest
from benchmarks.bits import BitsError, check, compare
from benchmarks.bits_rank import Trace
from benchmarks.result import Result

pytestmark = pytest.mark.slow  # starts programs


def trace(*losses: float, weights: str = "w") -> list[Trace]:
    """What each of two ranks has."""
    mine = Trace([struct.pack("<f", loss) for loss in losses], weights)
    return [Trace([b"same"] * len(losses), "same"), mine]


def test_equal_runs_are_right() -> None:
    runs = {"plain": trace(3, 2), "zero2": trace(3, 1), "zero3": trace(3, 1)}
    rows = compare("deterministic", runs, runs)
    assert [row["alike"] for row in rows] == ["plain", "zero2", "zero2"]
    assert all(row["right"] and row["repeats"] == row["agrees"] == "the same" for row in rows)
    check(Result("bits", {}, rows))


def test_any_rank_that_differs_is_named_with_its_first_step() -> None:
    once = {"zero2": trace(3, 2, 1), "zero3": trace(3, 2, 0)}
    again = {"zero2": trace(3, 2, 1), "zero3": trace(3, 9, 1)}
    first, second = compare("late", once, again)
    assert first["right"]
    assert (second["repeats"], second["agrees"]) == ("other bits from step 1", "other bits from step 2")
    with pytest.raises(BitsError, match=r"zero3 \(late\)"):
        check(Result("bits", {}, [first, second]))


def test_weights_alone_may_differ() -> None:
    rows = compare("late", {"zero3": trace(3, weights="a")}, {"zero3": trace(3, weights="b")})
    assert rows[0]["repeats"] == "other bits from step 1"
    assert not rows[0]["right"]


def test_of_a_users_kernels_nothing_is_required() -> None:
    rows = compare("default", {"plain": trace(3)}, {"plain": trace(4)})
    assert rows[0]["repeats"] == "other bits from step 0"
    check(Result("bits", {}, rows))
