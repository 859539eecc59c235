"""Observers: what they are told of a run, when, and at whose cost."""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import Training
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.observing import WaitWatcher, step_of
from tests.zero.helpers.training import adamw, own_work_seen
from zero.observe import (
    Event,
    JsonLines,
    MLflow,
    Observer,
    OpenTelemetry,
    Prometheus,
    Run,
    Step,
    TensorBoard,
    WeightsAndBiases,
)
from zero.report.records import read

HIGHEST_SCALE = 2.0**24


@dataclass
class Recorder(Observer):
    """Keeps what it is told."""

    every_rank: bool = False  # type: ignore[misc]
    runs: list[Run] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    closed: int = 0

    def begin(self, run: Run) -> None:
        self.runs.append(run)

    def begin_step(self, number: int) -> None:
        self.begun.append(number)

    def step(self, step: Step) -> None:
        self.steps.append(step)

    def event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1


class Failing(Observer):
    def step(self, step: Step) -> None:
        raise OSError("no space left")


def one_step(training: Training, context: Context, number: int, **logged: Any) -> None:
    loss = language_loss(training.engine.module, number, context.rank)
    training.backward(loss)
    training.step()
    training.engine.log(loss=loss, tokens=10, **logged)


class Once(Recorder):
    """Ends by itself after a step."""

    def step(self, step: Step) -> None:
        super().step(step)
        self.over = True


@pytest.mark.parametrize(
    ("extra", "package", "make"),
    [
        ("tensorboard", "torch.utils.tensorboard", lambda: TensorBoard("runs")),
        ("wandb", "wandb", WeightsAndBiases),
        ("mlflow", "mlflow", MLflow),
        ("prometheus", "prometheus_client", lambda: Prometheus(port=9100)),
        ("opentelemetry", "opentelemetry", OpenTelemetry),
    ],
)
def test_a_writer_without_its_library_says_what_to_install(
    extra: str, package: str, make: Callable[[], Observer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(zero.UsageError, match=rf"pip install 'accelz-zero\[{extra}\]'"):
        make()


def odd_body(context: Context, path: str) -> None:
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
    with engine.observe(JsonLines(path)):
        engine.backward(language_loss(model, 0, context.rank))
        engine.log(flag=True, small=np.float32(0.5), count=np.int64(3), far=float("inf"))
        engine.step()


def test_numbers_of_any_type_are_written_and_read_again(cluster: Clusters, tmp_path: Path) -> None:
    cluster(1).run(odd_body, path=str(tmp_path / "run.jsonl"))
    (step,) = read(tmp_path / "run.jsonl").steps
    assert [step[name] for name in ("flag", "small", "count", "far")] == [1.0, 0.5, 3.0, None]


def resume(training: Training, context: Context, path: str) -> list[Recorder]:
    """Load a checkpoint of 4 steps while somebody observes, then have others come and go."""
    engine = training.engine
    told = [Recorder(), Recorder(), Once(), Recorder()]
    for value in (torch.ones(3), "high"):  # on ranks that nobody observes, too
        with pytest.raises(zero.UsageError, match="a number or a tensor of one element"):
            engine.log(accuracy=value)
    with pytest.raises(zero.UsageError, match=r"such as zero.observe.Console\(\), not 'console'"):
        engine.observe("console")  # type: ignore[arg-type]
    with engine.observe(told[0]):
        engine.load_checkpoint(path)
        with engine.observe(told[1]):
            one_step(training, context, 6)
        one_step(training, context, 7)
    engine.observe(told[2])
    for number in (8, 9):
        one_step(training, context, number)
    with engine.observe(told[3]):
        one_step(training, context, 10)
    return told


def observed_body(context: Context, path: str) -> dict[str, Any]:
    model = fresh()
    training = Training(model, adamw(model), zero.Config(timeout=20, clip_norm=1.0))
    engine, first, every, failing = training.engine, Recorder(), Recorder(every_rank=True), Failing()
    one_step(training, context, 0)  # before anybody observes
    losses, norms, before = [], [], Counter(engine.traffic.bytes)
    with (
        warnings.catch_warnings(record=True) as caught,
        engine.observe(first, every, failing, flops_per_token=6.0, peak_flops=1e9),
    ):
        warnings.simplefilter("always")
        for number in range(1, 4):
            one_step(training, context, number)
            norms.append(float(engine.grad_norm))
        with torch.no_grad():
            losses.append(language_loss(model, 9, context.rank))
        engine.log(validation=2.0)
        engine.log(validation=4.0)
        engine.save_checkpoint(path)
        one_step(training, context, 4)
        engine.load_checkpoint(path)
        with pytest.raises(zero.UsageError, match="grad_norm"):
            engine.log(grad_norm=1.0)
        with pytest.raises(zero.UsageError, match=r"log\(seconds/data=...\): .* choose another name"):
            engine.log(**{"seconds/data": 1.0})
    one_step(training, context, 5)  # afterwards
    resumed = resume(training, context, path)
    return {
        "first": first,
        "every": every,
        "norms": norms,
        "sent": Counter(engine.traffic.bytes) - before,
        "resumed": resumed,
        "warned": [str(w.message) for w in caught if "told of nothing" in str(w.message)],
    }


def test_what_observers_are_told(cluster: Clusters, tmp_path: Path) -> None:
    found = cluster(2).run(observed_body, path=str(tmp_path / "c"))
    assert found[1]["first"] == Recorder()  # rank 0's alone
    assert [s.number for s in found[1]["every"].steps] == [2, 3, 4, 5]
    told: Recorder = found[0]["first"]
    (run,), steps = told.runs, told.steps
    assert (run.rank, run.world_size, run.steps, run.settings["clip_norm"]) == (0, 2, 1, 1.0)
    assert run.parameters == sum(p.numel() for p in fresh().parameters())
    assert told.begun == [2, 3, 4, 5]
    assert [s.number for s in steps] == [2, 3, 4, 5]
    assert told.closed == 1
    assert [(e.kind, e.step) for e in told.events] == [("save", 4), ("load", 4)]
    save, load = told.events
    assert set(save.rates) == {"collect", "write"}
    assert load.rates == {"load": load.bytes / load.seconds["load"]}
    assert load.bytes > 10 * run.parameters  # fp32 master and moments, of which each rank reads half
    assert (save.step, set(save.seconds)) == (4, {"collect", "write", "publish"})
    assert save.bytes > 0
    warned = [w for w in found[0]["warned"] if "Failing" in w]
    assert len(warned) == 1
    assert "OSError: no space left" in warned[0]


def test_observers_after_a_load_and_beside_each_other(cluster: Clusters, tmp_path: Path) -> None:
    found = cluster(2).run(observed_body, path=str(tmp_path / "c"))
    outer, inner, once, last = found[0]["resumed"]
    assert outer.runs[0].steps == 5
    assert (outer.begun, outer.events[0].step) == ([5, 6], 4)
    assert [[s.number for s in each.steps] for each in (outer, inner, once, last)] == [[5, 6], [5], [7], [9]]
    assert (outer.closed, inner.closed, last.closed) == (1, 1, 1)


def test_the_numbers_of_a_step(cluster: Clusters, tmp_path: Path) -> None:
    found = cluster(2).run(observed_body, path=str(tmp_path / "c"))
    steps: list[Step] = found[0]["first"].steps
    for step, norm in zip(steps, found[0]["norms"], strict=False):
        assert step.grad_norm == pytest.approx(norm, rel=1e-6)
    for step in steps:
        assert {"outside", "forward", "backward", "step"} <= set(step.phases)
        assert all(seconds >= 0 for seconds in step.phases.values())
        assert step.phases["forward"] > 0
        assert step.logged["tokens"] == 10
        assert step.tokens_per_second == pytest.approx(20 / step.seconds)
        assert step.mfu == pytest.approx(10 / step.seconds * 6.0 / 1e9)
        assert step.bytes["all_gather"] > 0
        assert step.calls["reduce_scatter"] > 0
        assert step.memory["parameters"] > 0
        assert step.learning_rate == 1e-2
        assert not step.skipped
    assert steps[2].logged["validation"] == 3.0  # the mean; logged after the step it belongs to
    assert {"evaluation", "checkpoint"} <= set(steps[3].phases)
    (once, *_) = [step.rates for step in steps if step.rates]
    assert {"all_gather", "reduce_scatter"} & set(once)
    assert all(0 < rate < 1e13 for rate in once.values())
    assert steps[1].units["blocks.0"] == steps[2].units["blocks.0"] > 0
    assert steps[3].seconds < sum(steps[3].phases.values())
    assert json.loads(json.dumps(steps[0].metrics()))["seconds/forward"] == steps[0].phases["forward"]


def unwaiting_body(context: Context) -> tuple[list[str], list[Step], int]:
    """Steps of a 16-bit model with a loss scale, of which the first overflow."""
    model = fresh()
    config = zero.Config(precision="fp16", loss_scale="dynamic", timeout=20)
    training, told, seen = Training(model, adamw(model), config), Recorder(), list[str]()
    engine = training.engine
    engine._loss_scale.scale.fill_(HIGHEST_SCALE)
    with engine.observe(told):
        for number in range(6):
            loss = language_loss(model, number, context.rank)
            with own_work_seen(), WaitWatcher() as watcher:
                training.backward(loss)
                training.step()
                engine.log(loss=loss)
            seen += watcher.seen
    return seen, told.steps, engine.skipped_steps


def test_an_observed_step_does_not_wait_for_the_device(cluster: Clusters) -> None:
    """And steps that overflow are told."""
    (seen, steps, skipped), (others, none, _) = cluster(2).run(unwaiting_body)
    assert (seen, others, none) == ([], [], [])
    assert len(steps) == 6
    assert sum(step.skipped for step in steps) == skipped > 0
    assert steps[0].loss_scale == HIGHEST_SCALE / 2
    assert all(step.logged["loss"] > 0 for step in steps)


def offloaded_body(context: Context, path: str) -> list[Step]:
    told, declared = Recorder(every_rank=True), context.accelerator.capabilities
    context.accelerator.capabilities = replace(declared, peak_flops=1e9)
    for offload in (zero.Offload(optimizer="host"), zero.Offload(optimizer="disk", path=path)):
        model = fresh()
        config = zero.Config(precision="bf16", offload=offload, timeout=20)
        training = Training(model, adamw(model), config)
        with training.engine.observe(told, flops_per_token=6.0):
            one_step(training, context, 0)
    context.accelerator.capabilities = declared
    return told.steps


def test_bytes_between_tiers_and_mfu_by_the_declared_peak_are_told(
    cluster: Clusters, device: str, tmp_path: Path
) -> None:
    for host, disk in cluster(2).run(offloaded_body, path=str(tmp_path)):
        assert host.mfu == pytest.approx(10 / host.seconds * 6.0 / 1e9)
        away = host.moved.get("to host", 0), host.moved.get("to device", 0)
        assert away == (0, 0) if device == "cpu" else min(away) > 0
        assert min(disk.moved["from disk"], disk.moved["to disk"]) > 0
        assert min(disk.rates["from disk"], disk.rates["to disk"]) > 0


def unobserved_body(context: Context) -> tuple[int, int, bool]:
    """What is kept while nobody observes, and whether an engine is freed that somebody does."""
    model = fresh()
    training = Training(model, adamw(model), zero.Config(timeout=20))
    for number in range(3):
        one_step(training, context, number)
    observation = training.engine._communicator.observation
    idle = len(observation._marks) + len(observation._logged) + len(observation._untold)
    flops = training.engine.count_flops(torch.zeros(2, 5, dtype=torch.int64, device=training.engine.device))
    return idle, flops, observation._over is None


def test_unobserved_nothing_is_kept_and_flops_are_counted(cluster: Clusters) -> None:
    for idle, flops, none in cluster(2).run(unobserved_body):
        assert idle == 0
        assert none
        assert flops > 3 * 2 * 10 * 12 * 29  # the four blocks' layers, and the head's among them


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.host
def test_a_resumed_file_reads_like_an_uninterrupted_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    run = Run("Model", "cpu", 0, 1, 10, 0, {})
    for first, last in ((1, 5), (3, 6)):
        if first == 3:
            with path.open("a") as file:
                file.write('{"step": 2, "lo')  # and then it crashed
        writer = JsonLines(path)
        writer.begin(run)
        for number in range(first, last):
            writer.step(step_of(number, loss=float("nan") if number == 2 else first))
        writer.event(Event("save", last - 1, 0.0, "there"))
    lines = lines_of(path)
    assert [(line.get("event", "step"), line["step"]) for line in lines] == [
        ("begin", 0),
        ("step", 1),
        ("step", 2),
        ("begin", 2),
        ("step", 3),
        ("step", 4),
        ("step", 5),
        ("save", 5),
    ]
    assert [line["loss"] for line in lines if "loss" in line] == [1, None, 3, 3, 3]
    assert lines[0]["model"] == "Model"


class Short(FileIO):
    """A file on a disk that is nearly full."""

    def write(self, data: Any) -> int:
        return super().write(data[:7])


@pytest.mark.host
def test_lines_are_whole_where_a_write_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, path = Path.open, tmp_path / "metrics.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda self, *how, **more: _short(sound, self, *how, **more))
        writer = JsonLines(path)
        writer.begin(Run("Model", "cpu", 0, 1, 10, 0, {}))
        writer.step(step_of(1, loss=2.0))
        writer.close()
    assert [line["step"] for line in lines_of(path)] == [0, 1]


def _short(sound: Any, path: Path, mode: str = "r", **how: Any) -> Any:
    return Short(path, mode) if how.get("buffering") == 0 else sound(path, mode, **how)
