"""Profiles: a trace with the engine's ranges, and shares of time that add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.loops import Training
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import adamw
from zero.observe.profile_summary import COMPUTE, IDLE, Span, summarise


@pytest.mark.host
def test_shares_are_of_the_innermost_range_and_add_up() -> None:
    ranges = [
        Span("zero::gather a", 0.0, 1.0),
        Span("zero::wait a", 3.0, 4.0),
        Span("zero::reduced a", 6.0, 6.5),
        Span("zero::step", 8.0, 11.0),
        Span("zero::copy to host", 9.0, 10.0),
        Span("zero::save write", 0.0, 12.0),  # in a thread of its own
    ]
    operations = [Span("aten::mm", 1.0, 3.5), Span("aten::mm", 4.0, 5.5), Span("aten::add_", 8.5, 8.6)]
    found = summarise(ranges, operations, [Span("kernel", 1.0, 2.0), Span("kernel", 1.5, 2.5)], steps=1)
    assert found.seconds[COMPUTE] == pytest.approx(3.5)
    assert found.seconds["gathers, begun"] == pytest.approx(1.0)
    assert found.seconds["gathers, waited for"] == pytest.approx(1.0)
    assert found.seconds["reduces, waited for"] == pytest.approx(0.5)
    assert found.seconds["optimizer"] == pytest.approx(2.0)
    assert found.seconds["copies between tiers"] == pytest.approx(1.0)
    assert found.seconds["checkpoints"] == pytest.approx(3.0)
    assert found.seconds[IDLE] == pytest.approx(0.0)
    assert found.total == pytest.approx(12.0)
    assert found.waited == {"a": pytest.approx(1.5)}
    assert found.hidden == pytest.approx(2.0)
    assert found.device == pytest.approx(1.5)
    assert "29.2%  computation" in str(found)
    assert summarise(ranges[:1], [Span("aten::mm", 2.0, 3.0)], [], 1).seconds[IDLE] == pytest.approx(1.0)


def profiled_body(context: Context, path: str) -> int:
    model = fresh()
    training = Training(model, adamw(model), zero.Config(timeout=20))
    with pytest.raises(zero.UsageError, match="at least one step"):
        training.engine.profile(0)
    if context.rank == 0:
        with pytest.warns(
            RuntimeWarning, match=r"Profiler is told of nothing more, .* directory: .*/a file/profile'"
        ):
            training.engine.profile(2, Path(path).with_name("a file") / "profile")
    for number in range(5):
        if number == 1:
            training.engine.profile(2, path)
        training.backward(language_loss(model, number, context.rank))
        training.step()
    return len(training.engine._communicator.observation.observers)


def test_a_profile_is_written_and_ends_by_itself(cluster: Clusters, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    (tmp_path / "a file").touch()
    assert cluster(2).run(profiled_body, path=str(folder)) == [0, 0]
    names = [
        event.get("name", "") for event in json.loads((folder / "trace.json").read_text())["traceEvents"]
    ]
    assert names.count("zero::step") == 2
    lines = (folder / "summary.txt").read_text().splitlines()
    assert lines[0].startswith("2 steps, ")
    shares = [float(line.split("%")[0].split()[-1]) for line in lines[2 : lines.index("", 2)]]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert any(line.endswith("  computation") for line in lines)
    assert any(line.endswith("  blocks.0") for line in lines[lines.index("", 2) + 1 :])
