"""Any rank of a job of 4,096 is played in one process: planned, made by `zero.initialize`, and trained."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Collection
from typing import Any

import pytest

from tests.accelz.fake_distribution import environment, install
from tests.zero.helpers.played import EXPERT, HIDDEN, KEYS, VOCABULARY, WIDTH

LAYERS = 2  # 80 are a model of 70 B parameters; see docs/meshes.md
PLACES = {0: [0, 0, 0], 1: [0, 0, 1], 8: [0, 1, 0], 64: [1, 0, 0], 4095: [63, 7, 7]}
"""Neighbours along each dimension, and the last rank of all."""
ACTIVATIONS = 200_000  # bytes of a token's in a layer, at most


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("played")
    install(folder, "played", "from tests.zero.helpers.played_device import accelz_backend")
    command = [sys.executable, "-m", "tests.zero.helpers.played", str(LAYERS), *map(str, PLACES)]
    done = subprocess.run(
        command,
        env=environment(folder, ACCELZ_DEVICE="played"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_an_engine_is_made_as_it_is_planned_in_little_time_and_memory(ranks: list[dict[str, Any]]) -> None:
    matrices = (2 * WIDTH * WIDTH + 2 * WIDTH * KEYS + 3 * WIDTH * HIDDEN) // 8
    norms = 2 * WIDTH
    divided, whole = LAYERS * matrices + 2 * VOCABULARY * WIDTH // 8, LAYERS * norms + WIDTH
    for rank, at in zip(ranks, PLACES.values(), strict=True):
        assert rank["coordinate"] == at
        assert rank["seconds"] + rank["trained"]["seconds"] < 60
        assert rank["bytes"] < 2e9
        # The job, its parts along "tp", along "dp", and twice those with the data; none for each rank alone.
        assert rank["trained"]["groups_made"] == 1 + 64 * 8 + 8 * 8 + 2 * 8
        expert = WIDTH * EXPERT * (1 + at[1] % 2)
        assert rank["units"] == LAYERS + 1
        assert rank["parameters"] == 8 * divided + whole + LAYERS * expert
        assert sorted(rank["groups"][:3]) == sorted(
            [[norms, norms // 512, 512], [matrices, matrices // 512, 512], [expert, expert // 64, 64]]
        )
        assert rank["trained"]["groups"] == rank["groups"]
        shard = (divided + whole) // 512 + LAYERS * expert // 64
        parameters, optimizer = rank["rest"]
        assert 0 <= parameters - 2 * shard < 1000  # slices are rounded up
        assert optimizer == 6 * parameters
        assert (
            0 <= rank["collectives"]["reduce_scatter"] - 2 * (divided + whole + LAYERS * expert) < 512 * 1000
        )


@pytest.mark.slow
def test_steps_take_the_memory_and_traffic_that_are_planned(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        planned, counted = rank["peaks"], rank["trained"]["peaks"]
        assert counted["init"] == planned["init"]
        assert 0 <= counted["step"] - planned["step"] < 1000  # a few numbers
        for phase in ("forward", "backward"):
            assert 0 <= counted[phase] - planned[phase] < (LAYERS + 2) * ACTIVATIONS
        assert 0 <= rank["trained"]["rest"] - sum(rank["rest"]) < 1000
        moved = dict(rank["trained"]["collectives"])
        assert moved.pop("all_reduce") == 8  # of the norm
        assert moved == rank["collectives"]


@pytest.mark.slow
def test_ranks_issue_the_same_in_the_same_order_over_all_that_they_share(ranks: list[dict[str, Any]]) -> None:
    """Those of torch's tensor parallelism are among them: no rank waits for another in a circle."""
    every = [[tuple(each) for each in rank["trained"]["issued"]] for rank in ranks]
    for mine, theirs in itertools.combinations(every, 2):
        shared = {group for group, _ in mine} & {group for group, _ in theirs}
        assert str(range(64 * 8 * 8)) in shared
        assert _over(shared, mine) == _over(shared, theirs)
    first = every[0]
    neighbours = [{group for group, _ in first} & {group for group, _ in other} for other in every[1:4]]
    assert [len(shared) for shared in neighbours] == [2, 2, 3]
    assert any(said.startswith("torch's all_reduce") for _, said in _over({str(range(8))}, first))


def _over(groups: Collection[str], issued: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [each for each in issued if each[0] in groups]
