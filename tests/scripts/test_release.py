"""What an index shows of the packages: metadata, links that work there, tags of the systems they run on."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from scripts.paths import ROOT
from trove_classifiers import classifiers

from accelz_cpu import native
from scripts import release, try_release

URL = "https://example.org/team/house"
BLOB = f"{URL}/blob/v1"


def _project(package: str) -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"])


@pytest.mark.parametrize("package", [*release.PACKAGES, "examples/sim_backend"])
def test_a_package_says_whose_it_is_and_what_it_is_for(package: str) -> None:
    project = _project(package)
    assert project["authors"] == [{"name": "The accelz and zero authors"}]
    assert project["license"] == "Apache-2.0"
    assert len(project["keywords"]) >= 4
    assert set(project["classifiers"]) <= classifiers
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} <= set(project["classifiers"])
    assert (ROOT / package / "src").is_dir()


@pytest.mark.parametrize("package", release.PACKAGES)
def test_links_of_a_readme_lead_into_the_repository(package: str) -> None:
    text = (ROOT / package / "README.md").read_text()
    shown = release.absolute_links(text, package, BLOB)
    assert "](../" not in shown
    assert shown.count(f"]({BLOB}/") == text.count("](../")
    assert not {"\n", " "} & set(shown.partition(f"]({BLOB}/")[2].partition(")")[0])


def test_a_link_to_nothing_is_told() -> None:
    with pytest.raises(
        release.ReleaseError, match=r"zero/README.md links to \.\./none.md, which is not there"
    ):
        release.absolute_links("[a](../none.md) [b](https://x.org) [c](#here)", "zero", BLOB)
    kept = "[b](https://x.org) [c](#here) [d](mailto:a@b.c)"
    assert release.absolute_links(kept, "zero", BLOB) == kept


def test_the_addresses_are_metadata() -> None:
    text = release.with_urls((ROOT / "accelz/pyproject.toml").read_text(), URL, BLOB)
    assert tomllib.loads(text)["project"]["urls"] == {
        "Documentation": f"{BLOB}/docs/index.md",
        "Changelog": f"{BLOB}/CHANGELOG.md",
        "Issues": f"{URL}/issues",
        "Repository": URL,
    }


def test_a_library_runs_from_the_newest_of_its_symbols_on() -> None:
    assert release.glibc(b"\0GLIBC_2.2.5\0GLIBC_2.17\0GLIBC_2.34\0GLIBC_2.4\0") == (2, 34)
    assert release.glibc(b"nothing") == (2, 17)


def _native() -> Path:
    found = native._find()
    if found is None:
        pytest.skip("accelz-cpu is installed without its library")
    return found


def test_the_native_wheel_needs_nothing_but_glibc(tmp_path: Path) -> None:
    tag = release.manylinux(_native())
    assert tag.startswith("manylinux_2_")
    unpacked, info = tmp_path / "unpacked", "foo-1.0.dist-info"
    (unpacked / info).mkdir(parents=True)
    shutil.copyfile(_native(), unpacked / "native.so")
    (unpacked / info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py3-none-linux_x86_64\n")
    (unpacked / info / "METADATA").write_text("Metadata-Version: 2.1\nName: foo\nVersion: 1.0\n")
    command = [sys.executable, "-m", "wheel", "pack", unpacked, "--dest-dir", tmp_path]
    subprocess.run(command, check=True, capture_output=True)
    wheel = tmp_path / "foo-1.0-py3-none-linux_x86_64.whl"
    found = release.tagged(wheel)
    assert found.name == f"foo-1.0-py3-none-{tag}.whl"
    assert not wheel.exists()
    with zipfile.ZipFile(found) as archive:
        assert email.message_from_bytes(archive.read(f"{info}/WHEEL"))["Tag"] == f"py3-none-{tag}"


@pytest.mark.slow
def test_a_release_has_it_all_and_the_same_bytes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = [[*release.build("accelz_xpu", URL, tmp_path / name)] for name in ("dist", "again")]
    assert [*release.problems(*builds)] == []
    (wheel, archive) = builds[0]
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (n for n in opened.namelist() if n.endswith("/METADATA"))
        metadata = email.message_from_bytes(opened.read(name))
    assert f"Repository, {URL}" in metadata.get_all("Project-URL", [])
    assert metadata["Author"] == "The accelz and zero authors"
    assert metadata["License-Expression"] == "Apache-2.0"
    version = (ROOT / "VERSION").read_text().strip()
    assert f"[accelz]({URL}/blob/v{version}/accelz)" in metadata.get_payload()
    assert archive.name == f"accelz_xpu-{version}.tar.gz"
    assert try_release.needs([wheel]) == []  # but accelz, which comes from the same folder

    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    other = [*release.build("accelz_xpu", URL, tmp_path / "other")]
    found = [*release.problems(builds[0], other)]
    assert [problem for problem in found if f"{wheel.name} has other bytes" in problem]


@pytest.mark.slow
def test_zero_brings_the_tests_of_its_engine(tmp_path: Path) -> None:
    """They run from the wheel, which the source archive makes as well, and are a small part of it."""
    wheel, archive = release.build("zero", URL, tmp_path / "dist")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert release.names(release._made(source, "wheel", tmp_path)) == release.names(wheel)
    with zipfile.ZipFile(wheel) as opened:
        tests = [each for each in opened.infolist() if each.filename.startswith("zero_conformance/tests/")]
        opened.extractall(tmp_path / "site")
    assert len(tests) > 200
    assert sum(each.compress_size for each in tests) < 1_000_000
    chosen = "test_importing_zero_loads or test_a_warning_names_the_line"
    command = [sys.executable, "-m", "zero", "check", "--device", "cpu", "-k", chosen]
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "zero on cpu passes: 2 passed, 0 skipped"


def test_the_list_of_parts_is_made_before_tools_of_tests_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "accelz-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("accelz-1.dist-info/METADATA", "Name: accelz\nRequires-Dist: psutil>=5\n")
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(try_release, "run", lambda *command, cwd=ROOT: ran.append((*map(str, command),)))
    try_release.main([str(tmp_path)])
    words = ("psutil>=5", "cyclonedx_py", "pytest-timeout")
    order = [next(n for n, command in enumerate(ran) if word in command) for word in words]
    assert order == sorted(order)
    assert len({*order}) == 3
