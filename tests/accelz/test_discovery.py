"""Backends are found one by one; a broken one is a row with its reason and nobody else's crash."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import accelz
from accelz import BackendDescriptor, BackendRow, Probe, discovery, list_backends, selection
from accelz.discovery import Status, best, installed, ties, unheard, unheard_host

from .fake_distribution import good, install

BROKEN = {
    "import failure": ("import a_library_that_is_not_there", "ModuleNotFoundError: .*a_library_that"),
    "exit at import": ("raise SystemExit(3)", "SystemExit: 3"),
    "syntax error": ("def broken(:", "SyntaxError"),
    "older API": (
        good("foo", api=0),
        "API 0, this accelz has API 2 and takes 1 too: pip .* --upgrade accelz-foo",
    ),
    "newer API": (
        good("foo", api=3),
        "API 3, this accelz has API 2 and takes 1 too: pip .* --upgrade accelz$",
    ),
    "API version of another type": (good("foo").replace(", 2,", ", '2',"), "api_version is '2'.*an integer"),
    "priority of another type": (good("foo").replace("10", "'high'"), "priority is 'high'.*an integer"),
    "another name": (good("bar"), "entry point is called 'foo' but its descriptor 'bar'"),
    "misspelled hook": (
        good("foo").replace("accelz_backend", "accelz_backnd"),
        "unknown hook 'accelz_backnd'",
    ),
    "hook without its mark": (good("foo").replace("@hookimpl", ""), "0 times; decorate"),
    "hook with an unknown argument": (good("foo").replace("accelz_backend()", "accelz_backend(x)"), "x"),
    "no descriptor": (
        "from accelz.hooks import hookimpl\n@hookimpl\ndef accelz_backend():\n    return 'foo'",
        "returned str; it must return accelz.BackendDescriptor",
    ),
    "probe raises": (good("foo").replace("Probe(True", "Probe(1 / 0"), "probe failed: ZeroDivisionError"),
    "probe exits": (
        good("foo").replace("lambda: Probe(", "lambda: exit(4) or ("),
        "probe failed: SystemExit: 4",
    ),
    "probe is no Probe": (
        good("foo").replace("Probe(True, 'a double of the cpu')", "True"),
        "probe failed: probe.. returned bool; it must return accelz.Probe",
    ),
    "probe without a reason": (
        good("foo").replace("'a double of the cpu'", "None"),
        "probe failed: probe.. returned reason=None; it must be a string",
    ),
    "probe that is unavailable for a number": (
        good("foo").replace("Probe(True, 'a double of the cpu')", "Probe(False, 5)"),
        "probe failed: probe.. returned reason=5; it must be a string",
    ),
    "probe with a word for an answer": (
        good("foo").replace("Probe(True", "Probe('no'"),
        "probe failed: probe.. returned available='no'; it must be True or False",
    ),
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on sys.path for fake distributions."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def _rows() -> dict[str, BackendRow]:
    return {row.name: row for row in list_backends({})}


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_backend_is_a_row_and_the_others_work(site: Path, source: str, reason: str) -> None:
    install(site, "foo", source)
    install(site, "sound", good("sound"))
    rows = _rows()
    assert rows["foo"].status is Status.BROKEN
    assert re.search(reason, rows["foo"].reason), rows["foo"].reason
    assert (rows["foo"].distribution, rows["foo"].version) == ("accelz-foo", "1.0")
    assert "\n" not in rows["foo"].reason
    assert rows["sound"].status is rows["cpu"].status is Status.AVAILABLE


def test_sorted_by_priority_then_name(site: Path) -> None:
    for name, priority in (("low", 5), ("high", 300), ("b", 50), ("a", 50), ("below", -1)):
        install(site, name, good(name, priority))
    install(site, "broken", "1 / 0")
    real = {"cuda", "hpu", "sim", "xpu"}  # whether these are installed does not matter here
    rows = list_backends({"ACCELZ_DISABLE": ",".join(real)})
    names = [row.name for row in rows if row.name not in real]
    assert names == ["high", "a", "b", "low", "cpu", "below", "broken"]


def test_an_unavailable_backend_keeps_its_reason(site: Path) -> None:
    install(site, "foo", good("foo", available=False, reason="no foo device"))
    row = _rows()["foo"]
    assert (row.status, row.reason, row.priority) == (Status.UNAVAILABLE, "no foo device", 10)


def test_of_two_backends_with_one_name_none_is_used(site: Path) -> None:
    install(site, "foo", good("foo", 10), distribution="accelz-b")
    install(site, "foo", good("foo", 99), distribution="accelz-a")
    rows = {row.distribution: row for row in list_backends({})}
    assert rows["accelz-a"].status is rows["accelz-b"].status is Status.BROKEN
    assert "accelz-a provides 'foo' too; uninstall one" in rows["accelz-b"].reason


def test_nobody_takes_a_first_partys_place(site: Path) -> None:
    install(site, "cpu", good("cpu", 900), distribution="aaa-cpu")
    install(site, "aaa", good("aaa", 0))
    rows = list_backends({})
    first = best(rows)
    assert first is not None
    assert first.distribution == "accelz-cpu", "by neither the alphabet nor the priority of its own"
    assert ties(rows) == ["aaa"]
    assert next(row for row in rows if row.distribution == "aaa-cpu").status is Status.BROKEN


SPOILERS = {
    "hangs_at_import": ("import time; time.sleep(99)", "importing it did not return within 1 s"),
    "hangs_in_c": (
        good("hangs_in_c").replace("Probe(True", "__import__('signal').pause() or Probe(True"),
        "its probe did not return within 1 s",
    ),
    "leaves_a_child": (
        "import os, time\nos.fork() or time.sleep(99)\ntime.sleep(99)",
        "importing it did not return within 1 s",
    ),
    "crashes_at_import": ("import ctypes; ctypes.string_at(0)", "importing it crashed with SIGSEGV"),
    "crashes": (
        good("crashes").replace("Probe(True", "__import__('os').abort() or Probe(True"),
        "its probe crashed with SIGABRT",
    ),
    "exits": ("import os; os._exit(3)", "importing it ended the process with code 3"),
    "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt:"),
    "closes_everything": ("import os; os.closerange(0, 999)", "importing it ended the process with code 0"),
    "closes_everything_and_stays": (
        "import os, time\nos.closerange(0, 999)\ntime.sleep(99)",
        "importing it did not return within 1 s",
    ),
    "talks": (
        "raise ImportError('\\x1b[2Jone\\ntwo ' + 'x' * 9999)",
        f"ImportError: [2Jone two {'x' * 276} …",
    ),
}


def test_what_hangs_or_crashes_is_named_and_the_others_work(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELZ_PATIENCE", "0.1")
    for name, (source, _) in SPOILERS.items():
        install(site, name, source)
    install(site, "sound", good("sound"))
    rows = _rows()
    assert rows["sound"].status is rows["cpu"].status is Status.AVAILABLE
    assert {name: rows[name].reason for name in SPOILERS} == {
        n: reason for n, (_, reason) in SPOILERS.items()
    }
    assert {rows[name].status for name in SPOILERS} == {Status.BROKEN}
    late = {name for name, (_, reason) in SPOILERS.items() if "did not return" in reason}
    assert {name for name in SPOILERS if rows[name].late} == late


def test_what_did_not_answer_in_time_counts_where_it_may_be_better() -> None:
    used = BackendRow("used", "accelz-used", "1", Status.AVAILABLE, "", 5)

    def late(priority: int | None) -> BackendRow:
        return BackendRow("late", "accelz-late", "1", Status.BROKEN, "", priority, late=True)

    counts = {priority: unheard([used, late(priority)]) is not None for priority in (9, 5, 4, -1, None)}
    assert counts == {9: True, 5: True, 4: False, -1: False, None: True}, "of equals the alphabet's first"
    assert [unheard([late(priority)]) is None for priority in (0, -1)] == [False, True]
    assert unheard([used, replace(late(9), late=False)]) is None, "broken in another way"


def test_for_host_memory_only_what_may_be_a_host_s_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one rank would have gloo where the others wait for it in shared memory."""

    def row(name: str, host: bool | None, late: bool, priority: int | None = None) -> BackendRow:
        described = {
            None: None,
            True: BackendDescriptor(name, 2, priority or 0, lambda: Probe(True, ""), _not_loaded, host=True),
            False: BackendDescriptor(name, 2, priority or 0, lambda: Probe(True, ""), _not_loaded),
        }[host]
        status = Status.BROKEN if late else Status.AVAILABLE
        return BackendRow(
            name, f"accelz-{name}", "1", status, "its probe hung", priority, described, late=late
        )

    ready = row("cpu", True, False, 0)
    assert unheard_host([row("cpu", True, True, 0)])
    assert unheard_host([ready, row("slow", None, True)])
    assert unheard_host([ready, row("better", True, True, 9)])
    assert unheard_host([ready, row("device", False, True, 100), row("worse", True, True, -1)]) is None
    monkeypatch.setattr(discovery, "list_backends", lambda _: [row("cpu", True, True, 0)])
    monkeypatch.setattr(selection, "_loaded_host", selection._loaded_host.__wrapped__)
    wanted = "'cpu' .* may be the one for host memory, but its probe hung; .*ACCELZ_DISABLE=cpu"
    with pytest.raises(accelz.SelectionError, match=wanted):
        accelz.host_collectives()


def _not_loaded() -> accelz.Accelerator:
    raise AssertionError


def test_where_no_process_can_be_made_backends_are_asked_here(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("os.fork", full)
    install(site, "foo", good("foo", available=False, reason="no foo"))
    rows = _rows()
    assert (rows["foo"].status, rows["foo"].reason) == (Status.UNAVAILABLE, "no foo")
    assert rows["cpu"].status is Status.AVAILABLE


def test_entry_points_that_cannot_be_read_are_one_row(site: Path) -> None:
    install(site, "foo", good("foo"))
    (site / "accelz_foo-1.0.dist-info/entry_points.txt").write_text("[accelz.backends]\nfoo\n")
    install(site, "bar", good("bar"))
    rows = _rows()
    assert rows["bar"].status is Status.AVAILABLE
    assert rows["accelz-foo"].status is Status.BROKEN
    assert "its entry_points.txt cannot be read" in rows["accelz-foo"].reason


def test_a_disabled_name_that_nobody_has_is_told(site: Path) -> None:
    install(site, "foo", good("foo"))
    with pytest.warns(UserWarning, match=r"ACCELZ_DISABLE names 'accelz-foo', and no .*: .*foo"):
        rows = {row.name: row for row in list_backends({"ACCELZ_DISABLE": "accelz-foo"})}
    assert rows["foo"].status is Status.AVAILABLE


def test_a_disabled_backend_is_not_even_imported(site: Path) -> None:
    marker = site / "imported"
    install(site, "foo", f"open({str(marker)!r}, 'w')\n1 / 0")
    install(site, "bar", good("bar"))
    rows = {row.name: row for row in list_backends({"ACCELZ_DISABLE": " foo , bar,"})}
    assert rows["foo"].status is rows["bar"].status is Status.DISABLED
    assert "ACCELZ_DISABLE" in rows["foo"].reason
    assert not marker.exists()
    assert rows["cpu"].status is Status.AVAILABLE


def test_listing_entry_points_imports_nothing(site: Path) -> None:
    marker = site / "imported"
    install(site, "foo", f"open({str(marker)!r}, 'w')")
    assert [entry.name for entry in installed("foo")] == ["foo"]
    assert not marker.exists()
