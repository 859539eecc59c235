"""The lints see what they are there for, on small packages made wrong on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts.paths import ROOT, absolute, all_relative, relative

import accelz
import zero
from scripts import (
    lint_devices,
    lint_links,
    lint_paths,
    lint_rooms,
    lint_store,
    lint_tests,
    lint_tiers,
    lint_versions,
)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import accelz_cuda", "zero must not import accelz_cuda"),
        ("def f():\n    from habana_frameworks import torch", "must not import habana_frameworks"),
        ("torch.cuda.synchronize()", "uses torch.cuda"),
        ("where = 'xpu:0'", "names the device 'xpu:0'"),
        ("if x.is_cuda: pass", "asks is_cuda"),
        ("from accelz import current\nacc = current()", ""),
        ("from accelz.roles.kernels import Kernels", "accelz.roles.kernels.Kernels is not public"),
        ("from accelz import roles", "accelz.roles is not public"),
        ("import accelz\naccelz.selection", "accelz.selection is not public"),
        ("from accelz.ranks.peers import _has_ended", "accelz.ranks.peers._has_ended is not public"),
        (
            "import accelz\nfrom accelz.ranks import peers\nfrom accelz.ranks.peers import Peers\naccelz.use",
            "",
        ),
    ],
)
def test_device_knowledge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, told: str) -> None:
    monkeypatch.setattr(lint_devices, "ROOT", tmp_path)
    path = tmp_path / "room.py"
    path.write_text(code)
    found = list(lint_devices.problems(path, "zero"))
    assert bool(found) == bool(told)
    assert not told or told in found[0]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("from torch.distributed import TCPStore", "TCPStore has no limit"),
        ("store = dist.distributed_c10d._get_default_store()", "_get_default_store has no limit"),
        ("def f(group):\n    group.store.for_torch.add('key', 1)", "only torch is given one"),
        ("def f(group):\n    group.store.add('key', 1)", ""),
    ],
)
def test_stores(tmp_path: Path, code: str, told: str) -> None:
    path = tmp_path / "room.py"
    path.write_text(code)
    found = "\n".join(lint_store.problems(path, "zero/src/zero/room.py"))
    assert told in found
    assert bool(found) == bool(told)


def test_nothing_reaches_for_a_store_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert lint_store.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("if record.tier == 'disk': pass", "'disk'"),
        ("near = 'device' != tier", "'device'"),
        ("away = tier in ('host', other)", "'host'"),
        ("away = 'disk' in (params, gradients)", "'disk'"),
        ("if tier is ON_HOST: pass", "ON_HOST"),
        ("match tier:\n    case 'disk': pass", "'disk'"),
        ("if 'device' in kwargs and tier.near: offload(ON_HOST, 'host')", ""),
    ],
)
def test_tiers(tmp_path: Path, code: str, told: str) -> None:
    path = tmp_path / "room.py"
    path.write_text(code)
    found = "\n".join(lint_tiers.problems(path, "room.py"))
    assert found.endswith(told)
    assert bool(found) == bool(told)


def test_no_room_but_tiers_asks_which_tier_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert lint_tiers.main() == 0, capsys.readouterr().out


def test_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All agree with one file, and one command brings them all to another version."""
    assert lint_versions.main() == 0, capsys.readouterr().out
    for name in ("accelz", "examples/sim"):
        (folder := tmp_path / name).mkdir(parents=True)
        (folder / "pyproject.toml").write_text(
            'requires = ["scikit-build-core>=1,<2"]\nversion = "0.1.0"\ndependencies = ["accelz>=0.1,<0.2"]\n'
        )
    (tmp_path / "VERSION").write_text("0.2.1\n")
    first, second, *_ = lint_versions.problems(tmp_path)
    assert first == "accelz/pyproject.toml: '0.1.0' is to be '0.2.1', by VERSION"
    assert second == "accelz/pyproject.toml: '>=0.1,<0.2' is to be '>=0.2,<0.3', by VERSION"
    lint_versions.write(tmp_path)
    assert list(lint_versions.problems(tmp_path)) == []
    assert "scikit-build-core>=1,<2" in (tmp_path / "accelz/pyproject.toml").read_text()


def test_what_is_installed_has_the_version() -> None:
    version = (ROOT / "VERSION").read_text().strip()
    assert {accelz.__version__, zero.__version__} == {version}


def test_imports(tmp_path: Path) -> None:
    """Also those inside functions, and modules named out of their package; not those for types alone."""
    known = {f"zero.{name}": tmp_path for name in ("a", "b", "c", "d", "p", "p.m")}
    path = tmp_path / "a.py"
    path.write_text(
        "import zero.b\nfrom zero.p import m, other\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from zero.d import D\n"
        "def f():\n    from zero.c import x\n"
    )
    assert lint_rooms.imported(path, known) == {"zero.b", "zero.c", "zero.p", "zero.p.m"}


def test_arrows() -> None:
    graph: dict[str, set[str]] = {
        "zero.low.a": set(),
        "zero.high": {"zero.low.a"},
        "zero.low.b": {"zero.high", "zero.low.a"},
    }
    assert list(lint_rooms.cycles(graph)) == []
    assert list(lint_rooms.misplaced(graph, ["low", "high"])) == [
        "zero.low.b imports zero.high: 'high' is not below 'low'"
    ]
    assert list(lint_rooms.misplaced({"zero.low.a": {"zero"}, "zero": {"zero.low.a"}}, ["low"])) == [
        "zero.low.a imports zero itself, which is above all rooms"
    ]
    found = list(lint_rooms.misplaced({"zero.new": set()}, ["gone"]))
    assert [("no room 'new'" in found[0]), ("'gone', but zero does not" in found[1])] == [True, True]
    (cycle,) = lint_rooms.cycles({"zero.a": {"zero.b"}, "zero.b": {"zero.a"}})
    assert "zero.a -> zero.b" in cycle


def test_height() -> None:
    graph: dict[str, set[str]] = {
        "zero": {"zero.top"},
        "zero.top": {"zero", "zero.middle.b", "zero.low"},
        "zero.middle.a": {"zero.low"},
        "zero.middle.b": {"zero.middle.a"},
        "zero.low": set(),
    }
    assert list(lint_rooms.too_high(graph, 3)) == []
    assert list(lint_rooms.too_high(graph, 2)) == ["3 floors, and there may be 2: top -> middle -> low"]


def test_training_converts_nothing() -> None:
    graph = {
        "zero.engine": {"zero.sources.opening"},
        "zero.cli": {"zero.sources.opening"},
        "zero.consolidate.run": {"zero.sources.opening"},
        "zero.whole.export": {"zero.consolidate.run"},
    }
    assert list(lint_rooms.converting(graph)) == [
        "zero.engine imports zero.sources.opening: training converts no weights"
    ]


def test_files_are_read_without_torch(tmp_path: Path) -> None:
    graph: dict[str, set[str]] = {
        "zero.files.reader": {"zero.errors", "zero"},
        "zero.files.dtypes": {"zero.files.reader"},
        "zero.sources.opening": {"zero.files.reader", "zero.low"},
        "zero.errors": set(),
        "zero.low": set(),
    }
    assert list(lint_rooms.heavy(graph, {"zero.files.dtypes"})) == []
    graph |= {"zero.package.m": set(), "zero.package": set()}
    graph["zero.errors"] = {"zero.package.m"}
    assert list(lint_rooms.heavy(graph, {"zero.package"})) == [
        "zero.package imports torch, and zero.package.m does without"
    ]
    assert list(lint_rooms.heavy(graph, {"zero.low"})) == [
        "zero.low imports torch, and zero.sources.opening does without"
    ]
    path = tmp_path / "a.py"
    for code in ("import torch.nn", "from accelz.peers import Peers", "import json"):
        path.write_text(code)
        assert lint_rooms.uses_torch(path) is (code != "import json")


def test_tables_of_modules() -> None:
    docstring = "A room.\n\nModules, lowest first:\n\na, b   two\nc\n       three\n\nNot a module."
    listed = lint_rooms.listed_modules(docstring)
    assert listed == [["a", "b"], ["c"]]
    graph: dict[str, set[str]] = {
        "zero.p.a": {"zero.p.b"},
        "zero.p.b": {"zero.q"},
        "zero.p.c.x": {"zero.p.a"},
    }
    assert list(lint_rooms.disordered("zero.p", listed, graph)) == []
    graph = {"zero.p.a": {"zero.p.c"}, "zero.p.c": set(), "zero.p.d": set()}
    assert list(lint_rooms.disordered("zero.p", listed, graph)) == [
        "the docstring of zero.p has no 'd'",
        "the docstring of zero.p has 'b'",
        "zero.p.a imports zero.p.c, which comes after it in the docstring of zero.p",
    ]
    assert lint_rooms.listed_modules("A room without a table.") == []


PATHS = {
    f"{ROOT}/tests/zero/helpers/training.py": "tests/zero/helpers/training.py",
    "/opt/torch/.venv/lib/python3.12/site-packages/torch/storage.py": "torch/storage.py",
    "/home/someone/.cache/x-1/bad/rank-00001.safetensors": "…/rank-00001.safetensors",
    "/scratch/": "…/scratch",
    "/proc/self/io": "/proc/self/io",
    "/home/you/accelz_acme/rng.py": "/home/you/accelz_acme/rng.py",
}


def test_paths_of_a_machine() -> None:
    for path, place in PATHS.items():
        text = f'E   File "{path}", line 3\n{path}:4: in f; --json={path}'
        assert relative(text) == text.replace(path, place)
        assert absolute(text) == ([] if path == place else [path] * 3)
        assert absolute(relative(text)) == []
    assert all_relative({"a": [f"{ROOT}/b/c", 1, None, Path("/d/e")]}) == {"a": ["b/c", 1, None, "…/e"]}
    for other in (
        "tests/zero/a.py",
        "https://a.org/b/c",
        "12 MB/s / rank",
        "</g></svg>",
        "~/runs/a",
        "../b/c",
    ):
        assert relative(other) == other


def test_stored_texts_have_no_paths_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [problem for path in lint_paths.files() for problem in lint_paths.problems(path)] == []
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "a.md").write_text("fine\nsee `/srv/b/c`\n")
    result = {"steps": [{"text": "E\n/work/of/one\n"}], "/a/key": 1}
    (tmp_path / "benchmarks" / "results" / "r.json").write_text(json.dumps(result))
    monkeypatch.setattr(lint_paths, "ROOT", tmp_path)
    found = [problem for path in lint_paths.files() for problem in lint_paths.problems(path)]
    assert [problem.partition(":")[2] for problem in found] == [
        "2: an absolute path, /srv/b/c",
        "steps[0].text: an absolute path, /work/of/one",
        ": an absolute path, /a/key",
    ]


def test_links_and_names_of_files(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "guide.md").write_text(
        "# A `guide`, (short)\n\n[up](../CONTRIBUTING.md) [in](#a-guide-short)\n"
    )
    (tmp_path / "CONTRIBUTING.md").write_text(
        "[a](docs/guide.md#a-guide-short) [b](docs/gone.md) [c](docs/guide.md#gone) [d](https://a.org/b)\n"
        "`tiers/disk.py`, `tiers/tape.py`, `zero/tiers/`, `zero/stages/`, `engine.step()`\n"
        "```\n[e](of-code.md) `of/code.py`\n```\n"
    )
    files = ["CONTRIBUTING.md", "docs/guide.md", "zero/src/zero/tiers/disk.py"]
    assert [*lint_links.problems("docs/guide.md", files, tmp_path)] == []
    assert [*lint_links.problems("CONTRIBUTING.md", files, tmp_path)] == [
        "CONTRIBUTING.md: docs/gone.md: no such file",
        "CONTRIBUTING.md: docs/guide.md#gone: no such heading",
        "CONTRIBUTING.md: there is no tiers/tape.py",
        "CONTRIBUTING.md: there is no zero/stages/",
    ]


def test_the_documentation_names_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert lint_links.main() == 0, capsys.readouterr().out


def test_places_of_tests(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    for name in ("zero/tiers/test_a.py", "zero/helpers/b.py", "zero/attic/old/c.py", "zero/test_flat.py"):
        (tests / name).parent.mkdir(parents=True, exist_ok=True)
        (tests / name).write_text("from tests.zero.tiers.test_a import f\n" * 501)
    assert list(lint_tests.strangers(tests / "zero", {"tiers"})) == [
        "tests/zero/attic is not called after a room of zero",
        "tests/zero/test_flat.py is in no room's folder",
    ]
    (told, *_) = lint_tests.borrowed(tests / "zero/helpers/b.py")
    assert told == "b.py imports the test tests.zero.tiers.test_a"
    assert list(lint_tests.too_long(tests / "zero/helpers/b.py")) == ["b.py has 501 lines; the most is 500"]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("if device != 'sim': pass", "names the device 'sim': ask for an ability"),
        ("x.to('cuda:1')", "names the device 'cuda:1': ask for an ability"),
        ("torch.xpu.synchronize()", "uses torch.xpu: go through accelz"),
        ("def f():\n    from accelz_sim import faults", "imports accelz_sim: see tests/simulated.py"),
        ("import accelz_cuda.memory as m", "imports accelz_cuda.memory: see tests/simulated.py"),
        ("x.to('cpu'); torch.backends.cuda.enable_flash_sdp(False); same = 'simple'", ""),
    ],
)
def test_tests_of_the_engine_name_no_device(tmp_path: Path, code: str, told: str) -> None:
    (path := tmp_path / "test_a.py").write_text(code)
    found = "\n".join(lint_tests.named_devices(path))
    assert found.endswith(told)
    assert bool(found) == bool(told)


def test_what_tests_of_the_engine_import_goes_with_them(tmp_path: Path) -> None:
    (path := tmp_path / "test_a.py").write_text(
        "from tests.zero.helpers import runs\nfrom tests.accelz.forked import started_ranks\n"
        "from tests.simulated import capacity\nfrom tests import simulated\nfrom tests.sim import layers\n"
        "from tests.simulated_more import x\nimport torch\nfrom torch import Tensor\n"
    )
    assert list(lint_tests.left_behind(path, ["simulated.py", "accelz/forked.py", "zero"])) == [
        "test_a.py imports tests.sim.layers, which zero/pyproject.toml does not name",
        "test_a.py imports tests.simulated_more.x, which zero/pyproject.toml does not name",
    ]
