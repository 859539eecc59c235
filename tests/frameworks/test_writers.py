"""Writers over other libraries, each read back by that library, or as its files say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from torch import nn

import zero
from tests.accelz.forked import held_port
from zero.observe import (
    Event,
    MLflow,
    OpenTelemetry,
    Prometheus,
    Run,
    Step,
    TensorBoard,
    WeightsAndBiases,
)

STEPS = 5


def train(*observers: zero.observe.Observer) -> list[float]:
    """Observed steps; returns the losses."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, losses = zero.initialize(model, optimizer), []
    with engine.observe(*observers):
        for _ in range(STEPS):
            loss = model(torch.ones(2, 4, device=engine.device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.log(loss=loss, tokens=8)
            losses.append(loss.item())
        engine._communicator.observation.event("placement", "all of it on the device")
    return losses


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = train(TensorBoard(tmp_path, every=2))
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [s.step for s in found.Scalars("loss")] == [1, 2, 3, 4, 5]
    assert [s.value for s in found.Scalars("loss")] == pytest.approx(losses)
    assert [s.step for s in found.Scalars("seconds/forward")] == [2, 4]
    assert found.Tags()["tensors"] == ["placement/text_summary"]


def test_wandb_offline(tmp_path: Path) -> None:
    import wandb

    losses = train(WeightsAndBiases(every=2, project="test", mode="offline", dir=str(tmp_path)))
    wandb.teardown()  # its service has written all then
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    data = file.read_bytes()  # records in which names and JSON values stand as they are
    assert all(f"{loss:.16f}"[:12].encode() in data for loss in losses)
    assert data.count(b"seconds/forward") == 2 * (STEPS // 2)  # in the history and the summary
    assert b"all of it on the device" in data


def test_mlflow_in_files(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    where = f"sqlite:///{tmp_path}/runs.db"
    told = MLflow("trial", where, every=2)
    assert not list(tmp_path.iterdir()), "the other ranks make one, too, and open no database"
    losses = train(told)
    client = MlflowClient(where)
    (run,) = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["stage"] == "3"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [
        (n, pytest.approx(loss)) for n, loss in enumerate(losses, start=1)
    ]
    assert [m.step for m in client.get_metric_history(run.info.run_id, "seconds/forward")] == [2, 4]
    assert run.data.tags["placement after step 5"] == "all of it on the device"


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as held:
        yield held.getsockname()[1]


def test_prometheus(tmp_path: Path, port: int) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    url = f"http://127.0.0.1:{port}/metrics"

    class Asked(Prometheus):
        def close(self) -> None:
            served.append(urlopen(url, timeout=10).read().decode())
            super().close()

    served: list[str] = []
    asked = Asked(port=port, path=tmp_path / "zero.prom")
    Prometheus(port=port)  # as another rank of the machine makes, which is told of nothing
    losses = train(asked)
    with pytest.raises(URLError):
        urlopen(url, timeout=10)
    for text in (*served, (tmp_path / "zero.prom").read_text()):
        samples = {s.name: s for f in text_string_to_metric_families(text) for s in f.samples}
        assert samples["zero_steps_total"].value == STEPS
        assert samples["zero_tokens_total"].value == 8 * STEPS
        assert samples["zero_last_loss"].value == pytest.approx(losses[-1])
        assert samples["zero_last_seconds_forward"].value > 0
        assert samples["zero_events_total"].labels == {"kind": "placement"}


def test_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    train(OpenTelemetry())
    found = spans.get_finished_spans()
    assert [span.name for span in found] == ["zero step"] * STEPS + ["zero placement"]
    assert all(span.end_time > span.start_time for span in found[:STEPS])
    assert found[0].attributes["step"] == 1


WRITERS: list[Callable[[Path], zero.observe.Observer]] = [
    TensorBoard,
    lambda path: Prometheus(path=path / "zero.prom"),
]


@pytest.mark.parametrize("make", WRITERS)
def test_numbers_that_are_not_finite_are_written(
    make: Callable[[Path], zero.observe.Observer], tmp_path: Path
) -> None:
    writer = make(tmp_path)
    writer.begin(Run("Model", "cpu", 0, 1, 10, 3, {"stage": 3}))
    nan = float("nan")
    writer.step(Step(10, 0.0, {"forward": 0.5}, {"loss": nan}, 0.1, {}, {}, 0.0, {}, {}, grad_norm=nan))
    writer.event(Event("save", 10, 0.0, "there"))
    writer.close()


def test_names_that_are_alike_to_prometheus_are_one_gauge(tmp_path: Path) -> None:
    with pytest.raises(zero.UsageError, match=r"port=9100, or path="):
        Prometheus()
    writer = Prometheus(path=tmp_path / "zero.prom")
    writer.step(Step(1, 0.0, {}, {"a/b": 1.0, "a_b": 2.0}, 0.1, {}, {}, 0.0, {}, {}))
    assert writer._registry.get_sample_value("zero_last_a_b") == 2.0
