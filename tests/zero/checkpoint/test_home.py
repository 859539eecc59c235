"""`~` in a path means the home directory, wherever zero takes a path."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import LanguageModel
from tests.zero.helpers.saving import engine_of, train
from zero import consolidate
from zero.config.paths import as_path


def home_body(context: Context, home: str) -> None:
    with mock.patch.dict(os.environ, {"HOME": home}):
        swap = zero.Offload(optimizer="disk", path="~/swap")  # a missing directory is refused
        engine = engine_of(context, offload=swap)
        train(engine, context)
        engine.save_checkpoint("~/runs/a")
        engine.load_checkpoint("~/runs")
        with consolidate.open_source("~/runs") as source:
            consolidate.consolidate(source, Path("~/weights"))
        engine.load_pretrained("~/weights")
        zero.load_pretrained(LanguageModel(), "~/weights")
        Path(home, "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
        zero.from_deepspeed("~/ds.json")


def test_the_home_directory(cluster: Clusters, tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    cluster(1).run(home_body, home=str(tmp_path))
    assert {"runs", "weights"} < {path.name for path in tmp_path.iterdir()}


def test_other_tildes_are_names() -> None:
    for name in ("~no-such-user/a", "a/~", "a~"):
        assert as_path(name) == Path(name)
