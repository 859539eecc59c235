"""What observers are told, through the loggers that users of frameworks have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import GeneralTracker
from lightning.pytorch.loggers import CSVLogger

from accelz.conformance.cluster import Clusters, Context
from tests.frameworks import accelerate_loops, trainer_runs
from tests.frameworks.jobs import begin_job
from tests.frameworks.lightning_modules import Module, loader, trainer_of
from zero.integrations.lightning import Metrics as LightningMetrics
from zero.integrations.transformers import Metrics
from zero.observe import Calls

PHASES = ("zero/seconds/forward", "zero/seconds/backward", "zero/bytes/all_gather", "zero/memory/parameters")


class Tracker(GeneralTracker):
    """Keeps what Accelerate gives it."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__(_blank=True)
        self.told: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def tracker(self) -> Tracker:
        return self

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.told.append((step, values))


def trainer_body(context: Context, directory: str) -> list[dict[str, float]]:
    begin_job(context)
    settings = {"logging_steps": 3, "num_train_epochs": 1}
    trainer = trainer_runs.make_trainer(3, directory, settings)
    trainer.add_callback(Metrics())
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def lightning_body(context: Context, folder: str) -> str:
    logger = CSVLogger(folder, version=context.rank)
    settings: dict[str, Any] = {"logger": logger, "callbacks": [LightningMetrics(every=2)]}
    trainer_of("zero", log_every_n_steps=1, **settings).fit(Module(), loader())
    return Path(logger.log_dir, "metrics.csv").read_text() if context.rank == 0 else ""


def accelerate_body(context: Context) -> list[tuple[int | None, dict[str, Any]]]:
    begin_job(context)
    tracker = Tracker()
    accelerator = accelerate_loops.make_accelerator(3, log_with=tracker)
    accelerator.init_trackers("run")
    parts = accelerate_loops.make_parts()
    accelerate_loops.prepare(accelerator, parts, (accelerate_loops.ALL_AT_ONCE,))
    with accelerator.engine_of(parts["model"]).observe(Calls(accelerator.log, every=2)):
        accelerate_loops.train(accelerator, parts)
    return tracker.told


def all_body(context: Context, folder: str) -> tuple[list[dict[str, float]], list[Any], str]:
    return (
        trainer_body(context, f"{folder}/trainer"),
        accelerate_body(context),
        lightning_body(context, f"{folder}/lightning"),
    )


@pytest.fixture(scope="module")
def told(cluster: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cluster(2).run(all_body, limit=90, folder=str(tmp_path_factory.mktemp("metrics")))


def test_trainer_logs_them_with_the_loss(told: Any) -> None:
    first, second = told[0][0]  # of seven steps; the last is not told yet when the Trainer logs
    for name in PHASES:
        assert first[name] > 0
        assert second[name] > 0
    assert not any("learning_rate" in name and name.startswith("zero") for name in first)
    assert not any(name.startswith("zero/") for entry in told[1][0] for name in entry)


def test_accelerates_trackers_are_told(told: Any) -> None:
    steps = told[0][1]
    assert [step for step, _ in steps] == [2, 4, 6]
    assert all(values[name] > 0 for _, values in steps for name in PHASES)
    assert told[1][1] == []


def test_lightnings_loggers_are_told(told: Any) -> None:
    head, *lines = told[0][2].splitlines()
    assert set(PHASES) <= set(head.split(","))
    column = head.split(",").index(PHASES[0])
    assert len([line for line in lines if line.split(",")[column]]) == 5  # every second of ten steps
