"""Versions of the interface: this one and the one before it are taken, others are one line."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

import accelz
from accelz import API_VERSION
from accelz.discovery import installed

from . import forked, signatures
from .fake_distribution import ROOT, good, install, python

OLD = Path(__file__).parent / "version_1"
GUIDE = (ROOT / "docs/api-stability.md").read_text()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder in which a backend of version 1 is installed, `old`, as it was written for accelz 0.1.0."""
    if not installed("sim"):
        pytest.skip("accelz-sim is not installed: see examples/sim_backend/README.md")
    install(tmp_path, "old", f"import sys\nsys.path.append({str(OLD)!r})\nfrom accelz_old.backend import *")
    return tmp_path


@pytest.mark.slow
def test_a_backend_of_the_version_before_passes_the_kit(old: Path) -> None:
    tests = "(test_step and (adamw or sgd or momentum)) or TestRng or load_gives or test_a_model_trains"
    _, summary = forked.check(old, tests, name="old")
    assert summary["failures"] == []
    assert summary["passed"] > 30


@pytest.mark.slow
def test_its_own_kernels_are_used_and_its_age_is_told(old: Path) -> None:
    script = """
        import accelz, torch
        from accelz.roles.kernels import NAMES
        from accelz.updates import AdamWUpdate, SgdUpdate
        acc = accelz.current()
        acc.bind(0)
        names = {name: acc.kernels.origin(name).rpartition(".")[2] for name in NAMES}
        print(sorted(name for name, owner in names.items() if owner == "OldKernels"))
        declared = acc.capabilities
        print(sorted(f for f, there in declared.flags().items() if there), declared.dtypes)
        master, grad = (torch.ones(3, device=acc.device) for _ in range(2))
        acc.kernels.step(SgdUpdate(master=master, grad=grad, lr=0.5, weight_decay=0.0))
        print(master.tolist())
    """
    done = python(old, script, ACCELZ_DEVICE="old")
    kernels, declared, values = done.stdout.splitlines()
    assert kernels == "['adamw', 'momentum', 'sgd']"
    assert "'async_collectives'" in declared, "what version 1 declared by default"
    assert "'storage_resize'" in declared
    assert "torch.bfloat16" in declared
    assert "'host_data_assignment'" not in declared
    assert values == "[0.5, 0.5, 0.5]"
    assert "backend 'old' (accelz-old) is for accelz API 1. This accelz has API 2 and adapts" in done.stderr


VERSION_1 = """
def probe():
    import accelz.streams
    return Probe(True, accelz.streams.NullStreams.__name__)

def load():
    import accelz, accelz.kernels
    from accelz.capabilities import Capabilities
    exec("from accelz.rng import *", names := {})
    from accelz.torch_device import TORCH_DEVICE
    class Mine(Capabilities):
        pass
    assert Capabilities | None
    assert isinstance(Mine(streams=True), Capabilities)
    assert Mine() == Mine(storage_resize=True, async_collectives=True)
    assert accelz.kernels.Kernels is accelz.Kernels, accelz.kernels.Kernels
    assert names['Rng'] is accelz.Rng
    from accelz_cpu.accelerator import build
    accelerator = build()
    accelerator.name = "foo"
    return accelerator
"""


@pytest.mark.slow
def test_what_version_1_was_written_with_is_there(tmp_path: Path) -> None:
    source = good("foo", api=1).replace("lambda: Probe(True, 'a double of the cpu')", "probe")
    install(tmp_path, "foo", source[: source.index("def load")] + VERSION_1 + source[source.index("@hook") :])
    script = """
        import sys, accelz
        (row,) = [row for row in accelz.list_backends() if row.name == "foo"]
        print(row.reason, "torch" in sys.modules)
        accelz.use("foo")
        from accelz import torch_device
        print(torch_device.Capabilities is accelz.Capabilities, accelz.Capabilities().storage_resize)
    """
    done = python(tmp_path, script)
    assert done.stdout.splitlines() == ["NullStreams False", "True False"], done.stderr


@pytest.mark.parametrize("version", [API_VERSION - 2, API_VERSION + 1])
def test_the_kit_on_another_version_is_one_line(tmp_path: Path, version: int) -> None:
    install(tmp_path, "foo", good("foo", api=version))
    script = "from accelz.cli import app; app(['check', 'foo'])"
    done = python(tmp_path, script)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    newer = "accelz" if version > API_VERSION else "accelz-foo"
    said = (
        f"backend 'foo' (accelz-foo) is written for accelz API {version}, this accelz has API {API_VERSION}"
    )
    assert line.startswith(f"error: {said}")
    assert line.endswith(f"pip install --upgrade {newer}")


def test_the_promise_is_about_the_versions_that_are_taken() -> None:
    assert f"takes versions {API_VERSION} and {API_VERSION - 1}" in GUIDE
    assert f"## Version {API_VERSION}" in GUIDE


def test_no_public_signature_changes_unseen() -> None:
    kept, found = signatures.FILE.read_text().splitlines(), signatures.text().splitlines()
    changes = [line for line in difflib.unified_diff(kept, found, lineterm="", n=0) if line[0] in "+-"]
    assert changes == [], "see docs/api-stability.md, then: python -m tests.accelz.signatures --write"


def test_what_is_public_is_all_in_the_snapshot() -> None:
    kept = signatures.FILE.read_text()
    assert [line[2:] for line in kept.splitlines() if line.startswith("# ")] == signatures.modules()
    assert len(signatures.modules()) >= 9
    for name in accelz.__all__:
        assert re.search(rf"^(class )?{name}\b", kept, re.MULTILINE), name
