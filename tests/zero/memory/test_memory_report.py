"""memory_report: where every byte of a step is, in categories that add up."""

from __future__ import annotations

import gc
import itertools
import pickle
import re
import types
from collections.abc import Callable
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers import pages
from tests.zero.helpers.layers import BATCH, LAYERS, WIDTH, build, one_step
from tests.zero.helpers.loops import in_plain_loop
from tests.zero.helpers.training import collect_all, collected
from zero.memory.memory_report import MemoryReport, Sample, Use
from zero.memory.memory_tracer import MemoryHistory
from zero.report.figures import X

NUMBER = 4  # bytes of the loss


def traced(engine: zero.Engine, context: Context) -> MemoryReport:
    engine.trace_memory()
    one_step(engine, 1)
    return engine.memory_report()


def engine_of(optimizer: Any = torch.optim.AdamW, **settings: Any) -> zero.Engine:
    collect_all()  # an earlier test's engine, whose memory would otherwise go in the middle of a step
    model = build()
    config = zero.Config(precision="bf16", timeout=20, **settings)
    return zero.initialize(model, optimizer(model.parameters(), lr=1e-3), config)


def of_phase(report: MemoryReport, phase: str) -> list[Sample]:
    return [s for s in report.samples if s.phase == phase]


def report_body(context: Context) -> dict[str, Any]:
    gc.collect()
    engine = engine_of()
    with pytest.raises(zero.UsageError, match="trace_memory"):
        engine.memory_report()
    one_step(engine, 0)
    report = traced(engine, context)
    one_step(engine, 2)
    assert engine.memory_report() is report  # one step was asked for
    numel = sum(g.layout.shard_numel for u in engine.units for g in u.groups)
    return {
        "report": report,
        "text": str(report),
        "record": 12 * numel,
        "shards": 2 * numel,
        "gathered": 2 * max(sum(g.layout.numel for g in u.groups) for u in engine.units),
        "exact": context.accelerator.capabilities.counts_every_byte,
    }


def test_the_report_accounts_for_every_byte(cluster: Clusters) -> None:
    for found in cluster(2).run(report_body):
        report: MemoryReport = found["report"]
        assert list(dict.fromkeys(s.phase for s in report.samples)) == ["forward", "backward", "step"]
        assert {s.held.optimizer for s in report.samples} == {found["record"]}
        for sample, use in zip(report.samples, report.uses(), strict=True):
            assert use.total == sample.peak
        for phase, peak in report.peaks().items():
            assert peak.use.total == max(s.peak for s in of_phase(report, phase))
        head, *rows = [re.split(r" {2,}", line.strip()) for line in found["text"].splitlines()]
        assert head[:2] == ["phase", "peak"]
        assert head[2:-1] == [
            "parameters", "gathered", "gradients", "optimizer", "activations", "other", "temporary",
        ]  # fmt: skip
        assert [row[0] for row in rows] == ["forward", "backward", "step"]
        if found["exact"]:
            check_bytes(found, report)


def test_the_page_draws_what_the_device_counts(cluster: Clusters) -> None:
    pytest.importorskip("vl_convert")
    (found,) = cluster(1).run(report_body)
    (figure,) = pages.figures(found["report"].to_html()).values()
    names = [each.name for each in fields(Use)]
    drawn = [name for name in names if name != "other" or found["exact"]]  # other: the process's
    assert pages.series(figure) == drawn


def check_bytes(found: dict[str, Any], report: MemoryReport) -> None:
    """Of a device that counts every byte."""
    assert {s.held.parameters for s in report.samples} == {found["shards"]}
    assert {s.other for s in report.samples} == {report.samples[0].other}
    assert max(s.held.gathered for s in report.samples) >= found["gathered"]
    saved = 2 * BATCH * WIDTH  # of a layer: what tanh puts out, in bf16; the first has its input too
    forward = of_phase(report, "forward")
    entered = [s for s in forward if s.unit][::2]
    cast = saved
    assert [s.activations for s in entered] == [cast + n * saved for n in range(LAYERS)]
    at_once = of_phase(report, "backward")[0]  # and the loss: fp32 copy of the output, its square, the mean
    of_loss = 2 * saved + NUMBER
    if in_plain_loop():  # autograd comes to the model later: the output's gradient, the loss and its own
        of_loss = saved + 2 * NUMBER
    assert at_once.activations == cast + LAYERS * saved + of_loss
    begin, *groups, end = of_phase(report, "step")
    assert [s.unit for s in groups] == [str(n) for n in range(LAYERS)]
    assert begin.held.gradients == found["shards"]
    assert end.held.gradients == (found["shards"] if in_plain_loop() else 0)  # until zero_grad
    assert all(s.activations == NUMBER for s in (begin, *groups, end))  # the loss, which the caller holds
    assert all(use.temporary >= 0 for use in report.uses())


def micro_body(context: Context, settings: dict[str, Any]) -> tuple[bool, list[int]]:
    """Activations are back to what the caller holds behind each micro-batch."""
    engine = engine_of(**settings)
    for step in range(2):
        for part in range(2):
            x = torch.ones(BATCH, WIDTH, device=engine.device)
            engine.backward(engine(x).float().square().mean())
            if part == 1:
                engine.step()
        if step == 0:
            engine.trace_memory()
    samples = engine.memory_report().samples
    ends = [a for a, b in itertools.pairwise(samples) if a.phase == "backward" != b.phase]
    return context.accelerator.capabilities.counts_every_byte, [s.activations for s in ends]


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2},
        {"stage": 1},
        {"stage": 0, "accumulate": "local"},
        {"accumulate": "local", "reduce_dtype": "fp16"},
        {"shard_ranks": 2},
    ],
)
def test_activations_end_with_their_backward(cluster: Clusters, settings: dict[str, Any]) -> None:
    """Whatever gradients keep for further ones is counted as gradients."""
    for exact, left in cluster(4 if "shard_ranks" in settings else 2).run(micro_body, settings=settings):
        assert len(left) == 2
        assert left == [NUMBER, NUMBER] or not exact


def own_steps_body(context: Context) -> tuple[bool, dict[str, int], int]:
    """An optimizer that no kernel serves: its fp32 gradients, and its state."""
    engine = engine_of(torch.optim.Adagrad)
    one_step(engine, 0)
    most = max(of_phase(traced(engine, context), "step"), key=lambda s: s.held.gradients)
    numel = sum(g.layout.shard_numel for u in engine.units for g in u.groups)
    held = {"gradients": most.held.gradients, "optimizer": most.held.optimizer, "other": most.other}
    return context.accelerator.capabilities.storage_resize, held, numel


def test_gradients_made_for_the_step_are_counted(cluster: Clusters) -> None:
    """Where a buffer's bytes cannot be dropped, the whole 16-bit gradients of both ranks' parts stay too."""
    for dropped, held, numel in cluster(2).run(own_steps_body):
        assert held["gradients"] == (2 + 4 + (0 if dropped else 2 * 2)) * numel
        assert held["optimizer"] == (4 + 4) * numel


def test_the_picture_is_over_seconds_and_adds_up() -> None:
    """Three samples, at 0, 1 and 4 seconds."""
    pytest.importorskip("vl_convert")
    from zero.tiers.device_bytes import DeviceBytes

    held = DeviceBytes(parameters=50)
    samples = (
        Sample("forward", "", 0.0, held, 0, 60, 60, 0),
        Sample("forward", "a", 1.0, held, 20, 80, 100, 0),
        Sample("step", "", 4.0, held, 0, 60, 90, 0),
    )
    report = MemoryReport(samples, 1000)
    first, second, third = report.uses()
    assert (first.parameters, first.other, first.temporary) == (50, 10, 0)
    assert (second.activations, second.temporary, second.total) == (20, 20, 100)
    assert (third.activations, third.temporary, third.total) == (20, 10, 90)  # as at the sample before
    (figure,) = pages.figures(report.to_html()).values()
    areas, _, begins, names = figure["layer"]
    assert areas["mark"]["interpolate"] == "step-before"  # what a point reports is of the time before it
    drawn = [(row[X], sum(row[each.name] for each in fields(Use))) for row in pages.rows(figure)]
    assert drawn == [(0, 60), (1000, 100), (4000, 90)]
    assert begins["data"]["values"] == [{X: 1000}]
    assert names["data"]["values"] == [{X: 500, "label": "forward"}, {X: 2500, "label": "step"}]


def leaving_body(context: Context) -> tuple[bool, list[Sample], int]:
    """Gradients on their way to the host are the device's until they have landed."""
    engine = engine_of(offload=zero.Offload(optimizer="host"))
    one_step(engine, 0)
    samples = of_phase(traced(engine, context), "step")
    slice_bytes = max(2 * g.layout.shard_numel for u in engine.units for g in u.groups)
    return context.accelerator.capabilities.counts_every_byte, samples, slice_bytes


def test_gradients_on_their_way_are_counted(cluster: Clusters) -> None:
    for exact, samples, slice_bytes in cluster(2).run(leaving_body):
        if exact:
            assert samples[0].held.gradients >= slice_bytes
            # The last to land may have, and its memory not be free yet.
            assert all(s.activations in (NUMBER, NUMBER + slice_bytes) for s in samples)
            assert (samples[-1].held.gradients, samples[-1].activations) == (0, NUMBER)


class Wide(nn.Module):
    """Takes much for a moment, between two points."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch.empty(1 << 20, dtype=torch.uint8, device=x.device)
        return (x @ self.weight).sum()


def wide_body(context: Context) -> tuple[bool, int]:
    engine = zero.initialize(model := Wide(), torch.optim.SGD(model.parameters()), zero.Config(timeout=20))
    engine.trace_memory()
    engine.backward(engine(torch.ones(4, 4, device=engine.accelerator.device)))
    engine.step()
    return context.accelerator.capabilities.counts_every_byte, engine.memory_report().peaks()[
        "forward"
    ].use.temporary


def test_what_comes_and_goes_between_points_is_temporary(cluster: Clusters) -> None:
    for exact, temporary in cluster(1).run(wide_body):
        assert temporary == (1 << 20) - NUMBER or not exact  # the loss, behind it, counts as there already


@collected()
def tiers_body(context: Context, path: str) -> dict[str, tuple[bool, int]]:
    """Whether reports of all tiers add up, and the least that any category has."""
    tiers = {
        "host": zero.Offload(optimizer="host", params="host"),
        "visiting": zero.Offload(optimizer="host", step="device"),
        "disk": zero.Offload(optimizer="disk", params="disk", gradients="disk", path=path),
    }
    found = {}
    for name, offload in tiers.items():
        engine = engine_of(offload=offload, clip_norm=1.0)
        one_step(engine, 0)
        report = traced(engine, context)
        sums = [use.total == s.peak for s, use in zip(report.samples, report.uses(), strict=True)]
        least = min(min(astuple(use)) for use in report.uses())
        found[name] = all(sums), least
        del engine
        gc.collect()
    return found


def test_reports_add_up_on_every_tier(cluster: Clusters, tmp_path: Path) -> None:
    for found in cluster(2).run(tiers_body, path=str(tmp_path), limit=60):
        for name, (adds_up, least) in found.items():
            assert adds_up, name
            assert least >= 0, name


def untraced_body(context: Context) -> tuple[bool, dict[str, tuple[int, int]]]:
    """The peak of a step that is followed, and of one that is not."""
    memory, found = context.accelerator.memory, {}
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "host": {"offload": zero.Offload(optimizer="host")},
        "half": {"offload": zero.Offload(optimizer="host", fraction=0.5)},
        "half, clipped": {"offload": zero.Offload(optimizer="host", fraction=0.5), "clip_norm": 1.0},
        "auto": {"offload": "auto"},
    }
    for name, each in settings.items():
        engine = engine_of(**each)
        for step in range(4):
            memory.reset_peak()
            one_step(engine, step)
        found[name] = memory.stats().peak, traced(engine, context).peak
        del engine
        gc.collect()
    return context.accelerator.capabilities.counts_every_byte, found


def test_following_a_step_does_not_change_it(cluster: Clusters) -> None:
    for exact, found in cluster(2).run(untraced_body, limit=60):
        for name, (alone, followed) in found.items():
            assert followed == alone or not exact, name


def whole_steps_body(context: Context) -> dict[str, MemoryReport]:
    """Steps in whose middle someone begins to ask, or that something else comes before."""
    engine = engine_of(gradient_accumulation_steps=2)
    device, found = engine.accelerator.device, {}

    def micro_batch() -> None:
        one_step(engine, 0)

    def after(name: str, *parts: Callable[[], Any]) -> None:
        for part in parts:
            part()
        while engine._tracer.steps:
            micro_batch()
        found[name] = engine.memory_report()

    def look() -> None:
        with torch.no_grad():
            engine(torch.ones(64 * BATCH, WIDTH, device=device))

    def forward() -> None:
        losses.append(engine(torch.ones(BATCH, WIDTH, device=device)).float().square().mean())

    def backward() -> None:
        engine.backward(losses.pop())

    losses: list[torch.Tensor] = []
    ask = engine.trace_memory
    after("at once", ask)
    after("in the middle", micro_batch, ask, micro_batch)
    after("before backward", forward, ask, backward, micro_batch)
    after("before step", micro_batch, forward, backward, ask, engine.step)
    after("dropped", ask, micro_batch, engine.zero_grad)
    after("nothing to drop", ask, forward, engine.zero_grad, backward, micro_batch)
    after("evaluation", ask, look)
    return found


def test_whole_steps_are_followed_or_nothing(cluster: Clusters) -> None:
    for found in cluster(2).run(whole_steps_body, limit=60):
        phases = [sample.phase for sample in found["at once"].samples]
        most = found["at once"].peaks()["forward"].use
        for name, report in found.items():
            assert [sample.phase for sample in report.samples] == phases, name
            assert report.samples[0].seconds < report.samples[-1].seconds < 20, name
            found_activations = report.peaks()["forward"].use.activations  # the host counts whole pages
            assert found_activations <= 1.5 * most.activations + most.gradients / 4, name


def history_body(context: Context, path: str) -> list[str]:
    """A device of which torch keeps a history of allocations: what is asked of it, and what is written."""
    asked: list[str] = []

    class Memory:
        @staticmethod
        def _record_memory_history(enabled: str | None = "all", max_entries: int = 0) -> None:
            asked.append(f"record {enabled}")

        @staticmethod
        def _snapshot() -> dict[str, Any]:
            asked.append("snapshot")
            return {"segments": []}

    device = types.SimpleNamespace(memory=Memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda device_: device)
        history = MemoryHistory(context.accelerator.device)
    engine = engine_of()
    engine._tracer._history = history
    engine._tracer.steps = 1  # as offload="auto" asks for
    one_step(engine, 0)
    engine._tracer.steps = 1
    loss = engine(torch.ones(BATCH, WIDTH, device=engine.device)).float().mean()
    engine.trace_memory()  # of a step that is followed already, without a record
    engine.backward(loss)
    engine.step()
    assert asked == []
    report = traced(engine, context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("io.text_encoding", lambda given, *_: given or "ascii")  # as LC_ALL=C may have it
        report.save(Path(path, "memory.html"))
    one_step(engine, 2)
    engine.trace_memory()
    engine.backward(engine(torch.ones(BATCH, WIDTH, device=engine.device)).float().mean())
    engine.zero_grad()  # forgets the step
    return asked


def test_torchs_history_of_allocations_is_written_beside_the_page(cluster: Clusters, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    (asked,) = cluster(1).run(history_body, path=str(tmp_path))
    assert asked == ["record all", "snapshot", "record None", "record all", "record None"]
    assert pickle.loads((tmp_path / "memory.pickle").read_bytes()) == {"segments": []}
    assert list(pages.figures((tmp_path / "memory.html").read_text(encoding="utf-8"))) == [
        "Memory inside a step"
    ]
