"""Compiled kernels on disk: what their names depend on, and what may go wrong with the files."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from accelz_cuda import compiler, kernels
from accelz_cuda.compiler import CubinCache, cache_folder, cache_name

NVRTC = (13, 0)


def never() -> bytes:
    raise AssertionError("must come from the cache")


def test_the_name_changes_with_all_that_the_cubin_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        cache_name("norm", "sm_90", NVRTC),
        cache_name("norm", "sm_80", NVRTC),
        cache_name("norm", "sm_90", (13, 1)),
        cache_name("adamw", "sm_90", NVRTC),
    ]
    assert names[0] == cache_name("norm", "sm_90", NVRTC)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "--fmad=true"))
        names.append(cache_name("norm", "sm_90", NVRTC))
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "source_text", lambda source: "another source")
        names.append(cache_name("norm", "sm_90", NVRTC))
    headers = kernels.header_texts()
    assert headers
    for header in headers:
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "header_texts", lambda h=header: headers | {h: headers[h] + " "})
            names.append(cache_name("norm", "sm_90", NVRTC))
    assert len(set(names)) == len(names)


def test_what_was_made_is_there_the_next_time(tmp_path: Path) -> None:
    content = bytes(range(256)) * 9
    assert CubinCache(tmp_path / "new" / "folder").get_or_make("a", lambda: content) == content
    assert CubinCache(tmp_path / "new" / "folder").get_or_make("a", never) == content


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d[:40] + b"?" + d[41:], lambda d: b""])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: object) -> None:
    cache = CubinCache(tmp_path)
    cache.get_or_make("a", lambda: b"x" * 100)
    (tmp_path / "a").write_bytes(damage((tmp_path / "a").read_bytes()))  # type: ignore[operator]
    assert cache.get_or_make("a", lambda: b"y" * 100) == b"y" * 100
    assert cache.get_or_make("a", never) == b"y" * 100


def test_ranks_that_start_together_see_whole_files_only(tmp_path: Path) -> None:
    def rank(index: int) -> bytes:
        return CubinCache(tmp_path).get_or_make("a", lambda: bytes([index]) * 100_000)

    with ThreadPoolExecutor(16) as pool:
        for content in pool.map(rank, range(64)):
            assert content == content[:1] * 100_000
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.warns(RuntimeWarning, match="no space left on device; set ACCELZ_CACHE_DIR"):
        assert CubinCache(tmp_path).get_or_make("a", lambda: b"made") == b"made"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = CubinCache(tmp_path / "file" / "folder")
    with pytest.warns(RuntimeWarning, match="every process compiles its own") as caught:
        assert cache.get_or_make("a", lambda: b"made") == b"made"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get_or_make("b", lambda: b"too") == b"too"


def test_the_folder_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELZ_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "own"
    assert CubinCache().folder == tmp_path / "own" / "cuda"
    monkeypatch.delenv("ACCELZ_CACHE_DIR")
    assert cache_folder() == tmp_path / "shared" / "accelz"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "accelz"


def test_a_cubin_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    first = compiler.cubin("norm", "sm_90", CubinCache(tmp_path))
    assert first[:4] == b"\x7fELF"
    monkeypatch.setattr(compiler.Toolchain, "compile", lambda *a: never())
    assert compiler.cubin("norm", "sm_90", CubinCache(tmp_path)) == first
    with pytest.raises(AssertionError, match="must come from the cache"):
        compiler.cubin("norm", "sm_80", CubinCache(tmp_path))
