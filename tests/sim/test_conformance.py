"""The package as a whole: what accelz says about it, and its conformance."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelz import list_backends
from accelz.cli import choose
from accelz.discovery import Status
from tests.accelz import forked

pytestmark = pytest.mark.slow  # starts programs


def test_it_passes_the_kit(tmp_path: Path) -> None:
    code, summary = forked.check(tmp_path, None, name="sim")
    assert [f"{failure['test']}: {failure['message']}" for failure in summary["failures"]] == []
    assert code == 0
    states = {row["name"]: row["state"] for row in summary["capabilities"] if row["declared"]}
    assert set(states.values()) == {"proved"}, states
    assert {"streams", "pinned_host_memory", "storage_resize", "exact_memory"} <= set(states)


def test_it_is_chosen_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in list_backends({}) if row.status is Status.AVAILABLE]
    assert rows[-1].name == "sim"
    monkeypatch.delenv("ACCELZ_DEVICE", raising=False)
    assert choose(rows)[0] != "sim"
    monkeypatch.setenv("ACCELZ_DEVICE", "sim")
    assert choose(rows)[0] == "sim"
