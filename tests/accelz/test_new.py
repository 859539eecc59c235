"""`accelz new`: what it writes installs, is found, and is told by the kit what to implement next."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from accelz import Capabilities, cli, conformance
from accelz.conformance import runner
from accelz.conformance.results import rank_in_order

from . import forked, reference_device
from .fake_distribution import environment, good, install, python

pytestmark = pytest.mark.slow  # starts programs

BIN = Path(sys.executable).parent
CORE = "TestMemory or TestRng or TestStreams or TestDtypes or adamw_over_many or repeated_calls or handles"


def _new(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["new", *map(str, arguments)])


def _install(source: Path, site: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--no-deps", "--target", str(site), str(source)],
        check=True,
        capture_output=True,
        timeout=100,
    )


def _accelz(site: Path, *arguments: str) -> tuple[int, Any]:
    done = subprocess.run(
        [BIN / "accelz", *arguments, "--json"],
        env=environment(site),
        cwd=site,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def foo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the package that `accelz new foo` writes is installed."""
    out, site = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("site")
    assert _new("foo", "--out", out).exit_code == 0
    _install(out / "accelz_foo", site)
    return site


def test_it_is_discovered_and_never_chosen_unasked(foo: Path) -> None:
    code, answer = _accelz(foo, "list")
    row = next(r for r in answer["backends"] if r["name"] == "foo")
    assert code == 0
    assert (row["distribution"], row["version"], row["status"]) == ("accelz-foo", "0.1.0", "available")
    assert row["priority"] < 0
    assert answer["selected"] != "foo"


@pytest.fixture(scope="module")
def report(foo: Path) -> dict[str, Any]:
    """What the kit says of the package as it is written, about descriptors and the roles to write first."""
    code, summary = forked.check(foo, f"test_descriptor or {CORE}", name="foo")
    assert code == 1
    return summary


@pytest.fixture
def failures(report: dict[str, Any]) -> list[dict[str, Any]]:
    return list(report["failures"])


def test_it_passes_the_tests_of_descriptors(report: dict[str, Any]) -> None:
    outcomes = [how for test, how in report["tests"].items() if test.startswith("test_descriptor.py")]
    assert "failed" not in outcomes
    assert outcomes.count("passed") >= 8


def test_each_failure_says_what_to_implement_next(failures: list[dict[str, Any]]) -> None:
    for failure in failures:
        assert failure["message"].startswith(f"{failure['broken']}: not implemented yet\n"), failure
        assert re.search(r"do:   accelz_foo/\w+\.py, [\w.]+: ", failure["message"]), failure
    missing = {failure["broken"] for failure in failures}
    assert {"Streams.current", "Streams.synchronize", "Memory.stats", "Rng.seed", "Rng.get_state"} <= missing


def test_failures_come_in_the_order_of_the_work(failures: list[dict[str, Any]]) -> None:
    order = [rank_in_order(failure["broken"]) for failure in failures]
    assert order == sorted(order)
    assert failures[0]["broken"].startswith("Streams.")


def test_the_report_for_people_names_each_method_once(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "run", lambda *_, **__: {**report, "seconds": 1.0})
    done = CliRunner().invoke(cli.app, ["check", "foo", "-k", "TestRng"])
    assert done.exit_code == 1
    assert done.stdout.count("Rng.seed: not implemented yet") == 1
    assert "do:   accelz_foo/rng.py, seed: " in done.stdout
    stubs = done.stdout.partition("\n\n")[0].splitlines()
    assert stubs[0] == "To be written, in this order:"
    assert len(stubs) == 16
    assert (
        stubs[1] == "  Event.done: accelz_foo/streams.py, Event.done: return whether the device has passed it"
    )
    assert stubs[-1].startswith("  Rng.set_state: accelz_foo/rng.py, set_state: ")
    assert "in:   test_a_seed_repeats_and_seeds_differ, test_every_bit_of_a_seed_counts, " in done.stdout
    assert "Traceback" not in done.output


def test_it_has_a_workflow_that_runs_the_kit(tmp_path: Path) -> None:
    assert _new("foo", "--out", tmp_path).exit_code == 0
    folder = tmp_path / "accelz_foo"
    workflow = (folder / ".github/workflows/conformance.yml").read_text()
    assert "runs-on: ubuntu-latest # a runner that has the device: [self-hosted, foo]" in workflow
    assert "actions/workflows/conformance.yml/badge.svg" in (folder / "README.md").read_text()
    command = re.search(r"run: (accelz check .*)", workflow)
    assert command is not None
    for stored, expected in ((False, ""), (True, " --against report.json")):
        (tmp_path / "report.json").touch() if stored else None
        shown = subprocess.run(
            ["bash", "-c", f"echo {command[1]}"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert shown.stdout == f"accelz check foo --report new-report.json{expected}\n"


def test_the_packages_own_tests_are_the_kits(tmp_path: Path, foo: Path) -> None:
    assert _new("foo", "--out", tmp_path).exit_code == 0
    done = forked.by_pytest(foo, "-k", "TestDescriptor or TestRng", cwd=tmp_path / "accelz_foo")
    assert "9 passed" in done.stdout, done.stdout + done.stderr
    assert "4 failed" in done.stdout
    assert "accelz conformance: foo" in done.stdout


VARIANTS = {
    "foo": (),
    "foo_x2": ("--collectives", "fccl", "--device-type", "npu"),
    "acme": ("--torch-device",),
    "f": ("--torch-device", "--collectives", "fccl", "--library", "torch_npu.all"),
}


def test_what_is_written_is_formatted_linted_and_typed(tmp_path: Path) -> None:
    for name, options in VARIANTS.items():
        assert _new(name, "--out", tmp_path, *options).exit_code == 0
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or "$" not in path.read_text(), path
    isolated = ("--isolated", "--line-length", "110")
    for command in (
        ("ruff", "format", "--diff", *isolated, "."),
        ("ruff", "check", *isolated, "--select", "E,F,I,B,UP,RUF", "."),
        ("mypy", "--strict", "--show-traceback", *(f"accelz_{name}/src" for name in VARIANTS)),
    ):
        done = subprocess.run(
            [BIN / command[0], *command[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


EDITS = {
    "asynchronous=True": "asynchronous=False",
    "shared_device=False": "shared_device=True",
    "memory_granularity=2 << 20": "memory_granularity=1",
}
"""All that a device of the kind of torch's reference device needs: the lines of what it is not."""


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a package for a device that torch.accelerator alone serves, and of that device."""
    folder, site = tmp_path_factory.mktemp("acme"), tmp_path_factory.mktemp("acme_site")
    reference_device.install(site)
    assert _new("acme", "--torch-device", "--out", folder).exit_code == 0
    plugin = folder / "accelz_acme/src/accelz_acme/backend.py"
    text = plugin.read_text()
    for old, new in EDITS.items():
        assert old in text
        text = text.replace(old, new)
    plugin.write_text(text)
    _install(folder / "accelz_acme", site)
    return site


def test_a_torch_device_passes_the_kit(acme: Path) -> None:
    """All of it but torch's own operators and reference kernels, which are those of accelz-sim here."""
    tests = "not TestKernels and not Operators"
    code, summary = forked.check(acme, tests, name="acme", quick=True)
    assert summary["failures"] == []
    assert code == 0
    assert summary["passed"] > 100
    states = {row["name"]: row["state"] for row in summary["capabilities"] if row["declared"]}
    assert set(states.values()) == {"proved"}, states


def test_the_reference_device_needs_at_most_five_lines() -> None:
    assert len(EDITS) <= 5


def test_its_roles_come_from_torch_accelerator(acme: Path) -> None:
    script = """
        import accelz, torch
        acme = accelz.current()
        acme.bind(1)
        generic = ("Stream", "Event", "memory_allocated", "synchronize")
        assert not [name for name in generic if hasattr(torch.acme, name)]
        kept = torch.zeros(1000, device="acme")
        stream = acme.streams.new()
        with acme.streams.use(stream):
            late = kept + 1
            done = acme.streams.current().record()
        assert not done.done()
        done.synchronize()
        print(kept.device, acme.memory.stats().allocated, float(late.sum()))
    """
    done = python(acme, script, ACCELZ_DEVICE="acme")
    assert done.stdout == "acme:1 8000 1000.0\n", done.stderr


def test_the_short_form_is_about_forty_lines_with_every_capability(tmp_path: Path) -> None:
    assert _new("foo", "--torch-device", "--collectives", "fccl", "--out", tmp_path).exit_code == 0
    text = "".join(path.read_text() for path in tmp_path.rglob("src/**/*.py"))
    assert len([line for line in text.splitlines() if line]) <= 45
    for field in dataclasses.fields(Capabilities):
        assert f" {field.name}=" in text


def test_where_the_library_is_missing_the_list_says_so(tmp_path: Path) -> None:
    assert _new("foo", "--torch-device", "--out", tmp_path).exit_code == 0
    _install(tmp_path / "accelz_foo", tmp_path / "site")
    _, answer = _accelz(tmp_path / "site", "list")
    row = next(r for r in answer["backends"] if r["name"] == "foo")
    assert (row["status"], row["reason"]) == ("unavailable", "torch_foo is not installed")


def test_what_the_package_says_of_itself(tmp_path: Path) -> None:
    assert _new("foo", "--torch-device", "--library", "torch_npu.all", "--out", tmp_path).exit_code == 0
    project = tomllib.loads((tmp_path / "accelz_foo/pyproject.toml").read_text())["project"]
    assert project["license"]
    assert project["authors"]
    assert "foo" in project["keywords"]
    assert [re.split("[>=<]", d)[0] for d in project["dependencies"]] == ["accelz", "torch-npu"]
    assert _new("bar", "--torch-device", "--out", tmp_path).exit_code == 0
    project = tomllib.loads((tmp_path / "accelz_bar/pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) == 1, "of a library that nobody has named, nothing is installed"


def test_the_library_is_required_by_the_name_that_it_is_installed_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`_pytest` is of pytest; and what no distribution has is not asked of an index."""
    (tmp_path / "torch_loose.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name, library, required in (("foo", "_pytest.mark", ["pytest"]), ("bar", "torch_loose", [])):
        assert _new(name, "--torch-device", "--library", library, "--out", tmp_path).exit_code == 0
        project = tomllib.loads((tmp_path / f"accelz_{name}/pyproject.toml").read_text())["project"]
        assert project["dependencies"][1:] == required


def test_the_packages_tests_have_all_of_the_kit(tmp_path: Path) -> None:
    assert _new("foo", "--out", tmp_path).exit_code == 0
    written = (tmp_path / "accelz_foo/tests/test_conformance.py").read_text()
    kit = Path(conformance.__file__).parent.glob("test_*.py")
    classes = {
        name for path in kit for name in re.findall(r"^class (Test\w+)", path.read_text(), re.MULTILINE)
    }
    assert classes == set(re.findall(r'^    "(Test\w+)",$', written, re.MULTILINE))


def _existing(folder: Path) -> None:
    (folder / "accelz_foo").mkdir()


BAD: dict[str, tuple[list[str], str, Callable[[Path], object]]] = {
    "a dash": (["foo-bar"], "'foo-bar' cannot be a backend's name.*identifier", lambda _: None),
    "upper case": (["Foo"], "'Foo' cannot be a backend's name", lambda _: None),
    "a digit first": (["2foo"], "'2foo' cannot be a backend's name", lambda _: None),
    "a name too long for a file": (["a" * 300], "cannot be written: .*too long", lambda _: None),
    "a keyword": (["class"], "'class' cannot be a backend's name", lambda _: None),
    "a path": (["../foo"], "cannot be a backend's name", lambda _: None),
    "first-party": (["cuda"], "'cuda' is reserved: accelz-cuda is a first-party", lambda _: None),
    "torch's": (
        ["torch", "--torch-device"],
        "'torch' cannot be a backend's name: it means",
        lambda _: None,
    ),
    "accelz's": (["accelz"], "'accelz' cannot be a backend's name", lambda _: None),
    "the engine's": (["zero"], "'zero' is reserved: accelz-zero is a first-party", lambda _: None),
    "there already": (["foo"], "accelz_foo already exists", _existing),
    "a library alone": (["foo", "--library", "x"], "--library requires --torch-device", lambda _: None),
    "a device number": (["foo", "--device-type", "npu:0"], "--device-type is 'npu:0'", lambda _: None),
    "a list": (["foo", "--collectives", "a,b"], "--collectives is 'a,b'", lambda _: None),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_written_is_said_and_nothing_is_left(tmp_path: Path, case: str) -> None:
    arguments, message, prepare = BAD[case]
    prepare(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = _new(*arguments, "--out", tmp_path)
    assert done.exit_code == 2
    assert re.search(message, " ".join(done.stderr.split())), done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_the_name_of_another_ones_backend_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "foo", good("foo"), distribution="foo-accelerator")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = _new("foo", "--out", tmp_path)
    assert done.exit_code == 2
    said = "'foo' is the name of an installed backend, foo-accelerator; choose another name, or uninstall it"
    assert said in " ".join(done.stderr.split())


def test_a_package_of_ones_own_can_be_written_anew_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "foo", good("foo"), distribution="accelz-foo")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _new("foo", "--torch-device", "--out", tmp_path).exit_code == 0
    assert (tmp_path / "accelz_foo").is_dir()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    done = _new("foo", "--out", tmp_path / "none")
    assert done.exit_code == 2
    assert "there is no folder" in done.stderr


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(path: Path, text: str, encoding: str) -> int:
        if path.name == "backend.py":
            raise OSError(28, "No space left on device")
        return write(path, text, encoding)

    monkeypatch.setattr(Path, "write_text", full)
    done = _new("foo", "--out", tmp_path)
    assert done.exit_code == 2
    assert "accelz_foo cannot be written: " in done.stderr
    assert "No space left on device" in done.stderr
    assert list(tmp_path.iterdir()) == []
