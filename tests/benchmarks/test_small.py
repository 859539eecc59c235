"""What is asked of a benchmark in few words, or of few ranks: no number is lost on the way to its table."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.__main__ import _peers
from benchmarks.compiled_peers import EAGER, PEERS
from benchmarks.result import Result

from benchmarks import compiled, offload, report

pytestmark = pytest.mark.slow  # starts programs

CONTEXT: dict[str, Any] = {
    "command": "",
    "date": "",
    "machine": {"cpu": "", "cores": 1, "memory": 1, "load": 0},
    "versions": {},
}


def test_a_peer_that_is_named_twice_is_one() -> None:
    assert _peers("plain, plain,zero3") == ("plain", "zero3")


def test_compiled_on_one_rank_moves_nothing() -> None:
    done: dict[str, Any] = {"moved": {}, "rounds": [[1.0]], "median": 1.0, "min": 1.0, "max": 1.0}
    done |= {"first_loss": 1.0, "last_loss": 1.0}
    rows = {name: {"peer": name, **done} for name in PEERS}
    shape = {"size": "tiny", "parameters": 1, "ranks": 1, "threads": 1, "batch": 1, "length": 1, "link": None}
    result = Result("compiled", shape, [compiled._row(row, rows, {}) for row in rows.values()])
    assert f"| {EAGER} | 1000 |" in report.as_markdown(CONTEXT, [result])


def test_what_is_stored_does_not_say_where_it_was_made() -> None:
    context = {**CONTEXT, "command": "python -m benchmarks step --json /scratch/of/one/step.json"}
    for text in (report.as_json(context, []), report.as_markdown(context, [])):
        assert "/scratch" not in text
        assert "/step.json" in text


class EveryByteTwice:
    """A job whose steps move the state of as many parameters as it has been given."""

    def __init__(self, service: object, arguments: tuple[Any, ...], *rest: object) -> None:
        self._parameters = arguments[0]

    def call(self, method: str, *arguments: object) -> list[offload.Turn]:
        return [offload.Turn(1.0, 24 * self._parameters, 24 * self._parameters)]

    def stop(self) -> None:
        pass


def test_offloaded_bytes_are_those_of_the_layers_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight million parameters are asked for, and a layer of four million fits in once."""
    monkeypatch.setattr(offload, "Job", EveryByteTwice)
    result = offload.run(offload.OffloadOptions(parameters=8_000_000, ranks=1, rounds=1))
    rows = {row["by"]: row for row in result.rows}
    assert rows["zero disk"]["bytes_per_parameter"] == 24
    assert result.settings["parameters"] == 4 << 20
    model = offload.model_of(result.settings["parameters"])
    assert sum(p.numel() for p in model.parameters()) == 4 << 20
