"""The process's accelerator is chosen once, loudly where it cannot be.

Each scenario runs in a process of its own: the choice belongs to the process.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accelz import BackendUnavailableError, hardware_hints, selection
from accelz.hardware_hints import missing_backends

from .fake_distribution import good, install
from .forked import python

CURRENT = "import accelz; print(accelz.current().name)"


def _last(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_unset_the_highest_priority_wins(tmp_path: Path) -> None:
    install(tmp_path, "best", good("best", 500))
    install(tmp_path, "better", good("better", 900, available=False))
    assert python(tmp_path, CURRENT).stdout == "best\n"


def test_what_is_selected_is_told_without_a_choice(tmp_path: Path) -> None:
    install(tmp_path, "best", good("best", 500))
    asked = "import accelz; print(accelz.selected()); accelz.current(); print(accelz.selected().name)"
    assert python(tmp_path, asked).stdout == "None\nbest\n"


def test_accelz_device_loads_that_backend_alone(tmp_path: Path) -> None:
    marker = tmp_path / "imported"
    install(tmp_path, "other", f"open({str(marker)!r}, 'w')\n" + good("other", 900))
    install(tmp_path, "wanted", good("wanted", -5))
    assert python(tmp_path, CURRENT, ACCELZ_DEVICE="wanted").stdout == "wanted\n"
    assert not marker.exists()


def test_below_priority_0_a_backend_is_used_only_where_it_is_asked_for(tmp_path: Path) -> None:
    install(tmp_path, "unreal", good("unreal", -1))
    assert python(tmp_path, CURRENT, ACCELZ_DEVICE="unreal").stdout == "unreal\n"
    error = _last(python(tmp_path, CURRENT, ACCELZ_DISABLE="cpu").stderr)
    assert "no backend can be used here" in error
    assert "ACCELZ_DEVICE=unreal" in error


def test_a_broken_backend_is_passed_over_unless_it_is_asked_for(tmp_path: Path) -> None:
    install(tmp_path, "foo", "import nothing_of_that_name")
    assert python(tmp_path, CURRENT).stdout == "cpu\n"
    error = _last(python(tmp_path, CURRENT, ACCELZ_DEVICE="foo").stderr)
    assert "BackendError: backend 'foo' (accelz-foo) is broken: ModuleNotFoundError" in error


def test_a_better_backend_that_does_not_answer_in_time_is_not_passed_over(tmp_path: Path) -> None:
    hangs = good("slow", 900).replace("Probe(True", "__import__('time').sleep(99) or Probe(True")
    install(tmp_path, "slow", hangs)
    script = """
        import accelz
        from accelz.cli import choose
        print(choose(accelz.list_backends()))
        accelz.current()
    """
    done = python(tmp_path, script, ACCELZ_PATIENCE="0.1")
    said = "backend 'slow' (accelz-slow) may be the best one, but its probe did not return within 1 s"
    assert f"SelectionError: {said}" in _last(done.stderr)
    assert "Set ACCELZ_DEVICE to the backend that is meant, on all ranks; or ACCELZ_PATIENCE" in done.stderr
    assert f'(None, "{said}' in done.stdout
    waited = (
        "waiting for backend 'slow' (accelz-slow): its probe has not returned yet, and may take up to 1 s"
    )
    assert done.stderr.count(waited) == 2, "once each time that backends are asked"
    assert "waiting for" not in python(tmp_path, CURRENT, ACCELZ_DEVICE="cpu").stderr


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"ACCELZ_DEVICE": "nosuch"},
            "BackendNotFoundError: no backend called 'nosuch' is installed. Installed: cpu (available), "
            "off (unavailable){sim}. Available: cpu{sim}. The names known here are cpu, cuda, hpu, off,",
        ),
        (
            {"ACCELZ_DEVICE": "cdua"},
            "no backend called 'cdua' is installed. Installed: cpu (available), off (unavailable){sim}. "
            "Available: cpu{sim}. Did you mean 'cuda'? The names known here are cpu, cuda, hpu, off,",
        ),
        (
            {"ACCELZ_DEVICE": "CPU"},
            "no backend called 'CPU' is installed. Installed: cpu (available), off (unavailable){sim}. "
            "Available: cpu{sim}. Did you mean 'cpu'?",
        ),
        (
            {"ACCELZ_DEVICE": "off:1"},
            "no backend called 'off:1' is installed. Installed: cpu (available), off (unavailable){sim}. "
            "Available: cpu{sim}. ACCELZ_DEVICE names a backend and no device number: write off. Each "
            "process takes the device of its local rank",
        ),
        (
            {"ACCELZ_DEVICE": "off"},
            "backend 'off' (accelz-off) cannot be used here: no such device.",
        ),
        (
            {"ACCELZ_DEVICE": "cpu", "ACCELZ_DISABLE": "cpu"},
            "BackendUnavailableError: backend 'cpu' is switched off by ACCELZ_DISABLE",
        ),
        (
            {"ACCELZ_DISABLE": "cpu"},
            "no backend can be used here. Installed: off (unavailable){sim}, cpu (disabled)",
        ),
    ],
)
def test_what_cannot_be_chosen_fails_loudly(tmp_path: Path, variables: dict[str, str], expected: str) -> None:
    install(tmp_path, "off", good("off", -3, available=False, reason="no such device"))
    done = python(tmp_path, CURRENT, **variables)
    assert done.returncode == 1
    # Other backends may be installed too; they are not chosen here, but they are listed.
    others = r" Available only on request: ACCELZ_DEVICE=sim\.|,? (cuda|hpu|xpu|sim) \(\w+\)|,? sim(?=[ .])"
    said = re.sub(others, "", _last(done.stderr)).replace("Installed:,", "Installed:")
    assert expected.replace("{sim}", "") in said


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ("raise OSError('driver too old')", "failed to load: OSError: driver too old"),
        ("raise SystemExit('no license server')", "failed to load: SystemExit: no license server"),
        ("return 'an accelerator'", "loaded a str; load() must return accelz.Accelerator"),
    ],
)
def test_a_load_that_fails_names_the_backend(tmp_path: Path, load: str, expected: str) -> None:
    install(tmp_path, "foo", good("foo").replace("def load():", f"def load():\n    {load}"))
    error = _last(python(tmp_path, CURRENT, ACCELZ_DEVICE="foo").stderr)
    assert error.startswith("accelz.errors.BackendError: backend 'foo'")
    assert expected in error


def test_two_backends_with_one_name_are_refused(tmp_path: Path) -> None:
    install(tmp_path, "foo", good("foo"), distribution="aaa-foo")
    install(tmp_path, "foo", good("foo"), distribution="bbb-foo")
    said = _last(python(tmp_path, CURRENT, ACCELZ_DEVICE="foo").stderr)
    assert "SelectionError: 'foo' is the name of two backends, of aaa-foo and bbb-foo" in said
    assert python(tmp_path, CURRENT).stdout == "cpu\n"
    checked = python(tmp_path, "from accelz.cli import app; app(['check', 'foo'])")
    assert (checked.returncode, checked.stdout) == (2, "")
    assert checked.stderr.startswith("error: 'foo' is the name of two backends, of aaa-foo and bbb-foo")
    assert len(checked.stderr.splitlines()) == 1


def test_a_first_partys_name_means_its_backend_however_it_is_chosen(tmp_path: Path) -> None:
    install(tmp_path, "cpu", "raise ImportError('a stray one')", distribution="aaa-cpu")
    script = """
        import accelz
        from accelz.cli import choose
        print(choose(accelz.list_backends())[0], accelz.current().name)
    """
    for variables in ({"ACCELZ_DEVICE": "cpu"}, {}):
        assert python(tmp_path, script, **variables).stdout == "cpu cpu\n"


def test_a_tie_is_told(tmp_path: Path) -> None:
    install(tmp_path, "foo", good("foo", 0))
    done = python(tmp_path, CURRENT)
    assert done.stdout == "cpu\n"
    assert (
        "the backends cpu, foo are available with one priority, 0, and cpu is used; set ACCEL" in done.stderr
    )


def test_use_selects_and_a_second_choice_is_an_error(tmp_path: Path) -> None:
    install(tmp_path, "foo", good("foo", 900))
    script = """
        import accelz
        first = accelz.use("cpu")
        assert accelz.use("cpu") is first is accelz.current()
        try:
            accelz.use("foo")
        except accelz.SelectionError as error:
            print(error)
        assert accelz.current() is first
    """
    printed = python(tmp_path, script).stdout
    assert "already runs on 'cpu'; the choice is made once per process" in printed
    assert "ACCELZ_DEVICE=foo" in printed


def test_use_against_the_environment_is_a_contradiction(tmp_path: Path) -> None:
    done = python(tmp_path, "import accelz; accelz.use('foo')", ACCELZ_DEVICE="cpu")
    assert "SelectionError: accelz.use('foo') contradicts ACCELZ_DEVICE=cpu" in _last(done.stderr)


def test_a_failed_choice_leaves_the_process_free(tmp_path: Path) -> None:
    script = """
        import accelz
        for _ in range(2):
            try:
                accelz.use("nosuch")
            except accelz.BackendNotFoundError:
                print("not found")
        print(accelz.use("cpu").name)
    """
    assert python(tmp_path, script).stdout.split("\n")[:3] == ["not found", "not found", "cpu"]


def test_what_is_for_host_tensors_is_of_the_backend_whose_device_is_the_host(tmp_path: Path) -> None:
    far = good("far").replace(
        "return accelerator", "accelerator.device = torch.device('meta')\n    return accelerator"
    )
    install(tmp_path, "far", "import torch\n" + far)
    script = """
        import accelz
        from accelz.selection import load_named
        cpu, got = load_named("cpu", {}).kernels, accelz.host_kernels()
        staged = accelz.host_collectives()
        print(accelz.current().name, type(got) is type(cpu), type(got).__name__, type(staged).__name__)
    """
    assert python(tmp_path, script, ACCELZ_DEVICE="cpu").stdout.split()[:2] == ["cpu", "True"]
    assert python(tmp_path, script, ACCELZ_DEVICE="far").stdout.split()[:2] == ["far", "True"]
    alone = python(tmp_path, script, ACCELZ_DEVICE="far", ACCELZ_DISABLE="cpu").stdout.split()
    assert alone == ["far", "False", "Kernels", "GlooLanes"]


def test_threads_get_one_accelerator(tmp_path: Path) -> None:
    slow = good("foo", 900).replace("def load():", "def load():\n    import time; time.sleep(0.2)")
    install(tmp_path, "foo", slow + "\nprint('plugin imported')")
    script = """
        import threading, accelz
        found = []
        threads = [threading.Thread(target=lambda: found.append(accelz.current())) for _ in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        print(len(found), len({id(a) for a in found}))
    """
    assert _last(python(tmp_path, script).stdout) == "8 1"


def _plant(root: Path, path: str, text: str = "") -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def test_hints_of_devices_without_a_backend(tmp_path: Path) -> None:
    assert missing_backends(set(), tmp_path) == []
    _plant(tmp_path, "dev/nvidia0")
    _plant(tmp_path, "dev/nvidia1")
    _plant(tmp_path, "sys/class/accel/accel0/device/vendor", "0x1da3\n")
    _plant(tmp_path, "sys/class/drm/renderD128/device/vendor", "0x1002\n")
    assert [h.distribution for h in missing_backends(set(), tmp_path)] == ["accelz-cuda", "accelz-hpu"]
    assert [h.backend for h in missing_backends({"cuda"}, tmp_path)] == ["hpu"]


def test_a_device_without_its_backend_warns_and_the_choice_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _plant(tmp_path, "dev/nvidia0")
    monkeypatch.setattr(
        hardware_hints, "missing_backends", lambda installed: missing_backends(set(), tmp_path)
    )
    monkeypatch.setattr(selection, "_selected", None)
    monkeypatch.delenv("ACCELZ_DEVICE", raising=False)
    with pytest.warns(
        UserWarning, match="cuda device seems to be present.*pip install accelz-cuda"
    ) as caught:
        assert selection.current().name == "cpu"
    assert caught[0].filename == __file__, "the warning must point at the caller"


def test_a_broken_backend_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    install(tmp_path, "foo", "raise ImportError('libfoo.so is missing')")
    script = """
        import warnings, accelz
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            print(accelz.current().name)
        print(*(w.message for w in told))
    """
    chosen, told = python(tmp_path, script).stdout.strip().split("\n")
    assert chosen == "cpu"
    assert "backend 'foo'" in told
    assert "is broken and was skipped" in told
    assert "libfoo.so is missing" in told
    assert python(tmp_path, script, ACCELZ_DEVICE="cpu").stdout.strip() == "cpu"
    assert python(tmp_path, script, ACCELZ_DISABLE="foo").stdout.strip() == "cpu"


def test_disabling_everything_is_an_error_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_selected", None)
    monkeypatch.setenv("ACCELZ_DISABLE", "cpu")
    monkeypatch.delenv("ACCELZ_DEVICE", raising=False)
    with pytest.raises(BackendUnavailableError, match="no backend can be used here"):
        selection.current()
