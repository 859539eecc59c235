"""Models of transformers, divided over ranks by tokens, tensors or experts."""

from __future__ import annotations

from pathlib import Path

from accelz.conformance.cluster import Clusters
from tests.frameworks import parallel_runs as runs


def test_transformers_train_on_divided_sequences(cluster: Clusters) -> None:
    for found in cluster(4).run(runs.ulysses_body, limit=60):
        assert max(found.values()) < 1e-6, found


def test_transformers_own_plans_train_as_one_process(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(4).run(runs.plans_body, folder=str(tmp_path), limit=100):
        assert max(found.values()) < 1e-6, found
