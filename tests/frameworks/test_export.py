"""engine.save_pretrained beside transformers' and PEFT's own save_pretrained."""

from __future__ import annotations

from pathlib import Path

from accelz.conformance.cluster import Clusters
from tests.frameworks.export_runs import adapters, saved


def test_files_are_those_of_transformers_and_peft(cluster: Clusters, tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    cluster(2).run(saved, folder=str(tmp_path), limit=120)
    cluster(2).run(adapters, folder=str(tmp_path / "adapters"), limit=120)
