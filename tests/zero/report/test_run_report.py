"""`zero report`: a run's JSON lines as a page."""

from __future__ import annotations

import html
import json
import os
import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import zero
from tests.zero.helpers.commands import run as zero_command
from tests.zero.helpers.observing import step_of
from tests.zero.helpers.pages import figures, rows, series
from tests.zero.helpers.runs import full_step, written
from zero.observe import JsonLines, Run
from zero.report import page
from zero.report.figures import X
from zero.report.records import read
from zero.report.run_report import run_page

drawing = pytest.mark.skipif(
    find_spec("vl_convert") is None, reason="the extra 'report' is not installed, as where a release is tried"
)

pytestmark = pytest.mark.host

LINE = '{"step": 1, "time": 0.0}\n'


@drawing
def test_a_run_becomes_a_page_that_needs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("io.text_encoding", lambda given, *_: given or "ascii")  # as LC_ALL=C may have it
        written(tmp_path)
        result = zero_command("report", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert list(figures(text)) == [
        "Loss",
        "Gradient norm, before clipping",
        "Learning rate",
        "Throughput",
        "MFU",
        "Time per step, by phase",
        "Mean time in a phase",
        "Waited for collectives",
        "Held by the engine",
        "In use",
        "Memory inside step 30",
        "Collectives, by unit",
        "Between tiers",
    ]
    assert not re.search(r"<(link|img|iframe|script[^>]* src)|@import|url\(", text.partition("<script")[0])
    assert "to &lt;b&gt;x&lt;/b&gt;" in text
    assert text.count("</script>") == 2
    shown = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", text))
    assert shown == {
        "last loss": "0.1333",
        "best validation loss": "2",
        "tokens per second": "278",
        "MFU": "8.3%",
        "time per step": "360 ms",
        "peak memory": "900 B",
    }
    assert "Net, 2 M parameters · 4 ranks, rank 0 on cpu · steps 1 to 30 · 0:00:29" in text


@drawing
def test_pictures_have_what_the_lines_say(tmp_path: Path) -> None:
    found = figures(run_page(read(written(tmp_path))).render())
    assert series(found["Loss"]) == ["loss", "validation_loss"]
    loss = rows(found["Loss"])
    assert [(row[X], row["loss"]) for row in loss[:2]] == [(1, 4.0), (2, 2.0)]
    assert [row[X] for row in loss if row["validation_loss"] is not None] == [10, 20, 30]
    phases = found["Time per step, by phase"]
    assert series(phases) == ["outside", "forward", "backward", "step"]
    assert rows(phases)[4] == {X: 5, "outside": 0.01, "forward": 0.1, "backward": 0.2, "step": 0.05}
    assert rows(found["Collectives, by unit"]) == [
        {"name": "embedding", "value": 100},
        {"name": "block.0", "value": 3000},
    ]
    assert rows(found["MFU"])[0]["mfu"] == pytest.approx(100 / 0.36 * 3 / 1e4)
    for figure in found.values():
        encodings = [layer["encoding"] for layer in figure.get("layer", [figure])]
        assert any(each.get("y", {}).get("title") for each in encodings)
        assert any(each.get("x", {}).get("title") for each in encodings)
        assert any("tooltip" in each for each in encodings)


@drawing
def test_bytes_and_seconds_are_drawn_from_0_on(tmp_path: Path) -> None:
    """Equal values, as of what moves between tiers, would have an axis with one label."""
    drawn = figures(run_page(read(written(tmp_path))).render())
    scales = {
        title: [layer["encoding"]["y"]["scale"]["zero"] for layer in drawn[title]["layer"][:-1]]
        for title in ("Loss", "In use", "Between tiers", "MFU")
    }
    assert scales == {"Loss": [False], "In use": [True], "Between tiers": [True], "MFU": [True]}


@drawing
def test_a_long_run_is_drawn_by_means_and_without_its_first_spike(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    lines = [{"step": n, "time": 0.0, "loss": float(n % 2), "seconds/step": 0.1} for n in range(1, 2501)]
    lines[0]["seconds/step"] = 60.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = run_page(read(path)).render()
    loss = rows(figures(text)["Loss"])
    assert len(loss) == 834
    assert loss[0][X] == 3
    assert loss[0]["loss"] == pytest.approx(2 / 3)
    assert "Each point is the mean of 3 steps." in text
    time = figures(text)["Time per step, by phase"]
    assert time["layer"][0]["encoding"]["y"]["scale"]["domain"][1] == pytest.approx(0.15)
    assert "Spikes of up to 20.1 s are cut off." in text


def test_units_are_written_where_they_change(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path)
    writer.begin(Run("Net", "cpu", 0, 1, 10, 0, {}))
    for number, units in enumerate(({"a": 10}, {"a": 10}, {"a": 10, "b": 4}, {"a": 10, "b": 0}), start=1):
        writer.step(replace(step_of(number), units=units))
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("units") for line in told[1:]] == [{"a": 10}, None, {"a": 10, "b": 4}, {"a": 10, "b": 0}]
    assert read(path).units() == {"a": 10, "b": 1}


def test_a_run_that_goes_on_or_was_resumed_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, steps=5)
    again = JsonLines(path)
    again.begin(Run("Net", "cpu", 0, 2, 2_000_000, 3, {}))
    again.step(full_step(4))
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # is being written
    records = read(tmp_path)
    assert [row["step"] for row in records.steps] == [1, 2, 3, 4]
    assert [run["world_size"] for run in records.runs] == [4, 2]
    assert "begun 2 times" in run_page(records).facts


@drawing
def test_names_and_values_of_any_kind_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    odd: dict[str, Any] = {"step": 1, "time": 0.0, "loss": None, "acc.top[1]'s": 0.5, "</script>": 1.0}
    path.write_text(json.dumps(odd) + "\n" + json.dumps({**odd, "step": 2}) + "\n")
    text = run_page(read(path)).render()
    found = figures(text)
    assert list(found) == ["acc.top[1]&#x27;s", "&lt;/script&gt;"]
    assert rows(found[html.escape("acc.top[1]'s")])[0] == {X: 1, "acc_top_1__s": 0.5}
    assert text.count("</script>") == 2


@drawing
def test_kinds_of_which_a_part_was_logged_are_drawn_and_only_losses_have_a_best(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"step": n, "time": 0.0, "calls/api": 3.0, "val_accuracy": accuracy}
        for n, accuracy in enumerate((0.5, 0.9, 0.7), start=1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = run_page(read(path)).render()
    assert "<dt>last val accuracy</dt><dd>0.7</dd>" in text
    assert re.search(r"api</td>\s*<td[^>]*>3</td>", text)


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ([], "has none"),
        (["", ""], "has 2"),
        (['{"event": "save", "step": 1}\n'], "has no steps"),
        ([LINE + "nonsense\n" + LINE], "line 2, is not what JsonLines writes"),
        *(
            ([text + "\n" + LINE], "line 1, is not what JsonLines writes")
            for text in (
                "[]",
                "[" * 100_000,
                '{"step": 1}',
                '{"step": NaN, "time": 0}',
                '{"step": 1, "time": "0"} x',
                '{"step": 1, "time": 0, "loss": "much"}',
                '{"step": 1, "time": 0, "loss": 1%s}' % ("0" * 400),
                '{"step": 1, "time": 0, "\\ud800": 1}',
                '{"step": 1, "time": 0, "units": [1]}',
                '{"step": 1, "time": 0, "units": {"a": "b"}}',
                '{"step": 1, "time": 0, "event": 5}',
                '{"step": 1, "time": 0, "event": "save", "seconds": 5}',
                '{"step": 1, "time": 0, "event": "begin"}',
            )
        ),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, texts: list[str], told: str) -> None:
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.jsonl").write_text(text)
    result = zero_command("report", tmp_path)
    assert result.exit_code == 2
    assert told in result.stderr.replace("\n", " ")


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.jsonl")
    for path in (tmp_path, tmp_path / "run.jsonl", Path("/dev/zero")):
        result = zero_command("report", path)
        assert result.exit_code == 2
        assert "is no regular file" in result.stderr.replace("\n", " ")


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = zero_command("report", tmp_path / "gone")
    assert result.exit_code == 2
    assert "there is no" in result.stderr
    assert "JsonLines" in result.stderr


def test_without_the_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    page.library.cache_clear()
    with pytest.raises(zero.UsageError, match=r"pip install 'accelz-zero\[report\]'"):
        run_page(read(written(tmp_path))).render()
