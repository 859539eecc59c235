"""Random combinations of settings and events, compared with plain training: what no list of cases thinks of.

`--runs 500` runs more of them. A failure reports its seed and what was drawn.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from accelz.conformance.cluster import Clusters
from tests.zero.helpers.random_runs.play import play_body


@pytest.mark.parametrize("size", [1, 2, 4])
def test_random_runs(cluster: Clusters, size: int, runs: int, tmp_path: Path) -> None:
    seeds = list(range(1000 * size, 1000 * size + runs))
    cluster(size).run(play_body, limit=60 + 10 * runs, seeds=seeds, folder=str(tmp_path))


def test_random_runs_compiled(cluster: Clusters, runs: int, tmp_path: Path) -> None:
    seeds = list(range(1 + runs // 8))
    cluster(2).run(play_body, limit=60 + 10 * runs, seeds=seeds, folder=str(tmp_path), compiled=True)
