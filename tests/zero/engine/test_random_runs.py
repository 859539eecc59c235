"""Random combinations of settings and events, compared with plain training: what no list of cases thinks of.

Some of them, which draw everything there is; `--runs 500` runs that many of each. A failure reports its seed
and what was drawn.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from accelz.conformance.cluster import Clusters
from tests.zero.conftest import Abilities
from tests.zero.helpers.random_runs.chosen import RANKS, chosen
from tests.zero.helpers.random_runs.play import play_body

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", RANKS)
def test_random_runs(cluster: Clusters, abilities: Abilities, size: int, runs: int, tmp_path: Path) -> None:
    """Everything is drawn twice on the host, and once elsewhere."""
    seeds = [seed for ranks, seed in chosen(times=1 if abilities.apart else 2) if ranks == size]
    seeds = list(range(1000 * size, 1000 * size + runs)) if runs else seeds
    cluster(size).run(play_body, limit=60 + 10 * len(seeds), seeds=seeds, folder=str(tmp_path))


def test_random_runs_compiled(cluster: Clusters, abilities: Abilities, runs: int, tmp_path: Path) -> None:
    seeds = list(range(runs // 8)) or ([1] if abilities.apart else [0, 1])
    limit = 60 + 20 * len(seeds)
    cluster(2).run(play_body, limit=limit, seeds=seeds, folder=str(tmp_path), compiled=True)
