"""`zero consolidate`, `inspect` and `verify`: what they print, and what they say when something is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from zlib import crc32

import pytest
import torch

import zero
from tests.zero.helpers import saved, synthetic
from tests.zero.helpers.commands import refused, run
from zero.config import sizes
from zero.files import manifest as form

MODEL = {"embedding.weight": torch.arange(600.0).view(20, 30), "scale": torch.tensor([1.5])}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    synthetic.save(tmp_path / "runs" / "step-7", MODEL)
    return tmp_path / "runs" / "step-7"


@pytest.mark.parametrize("module", ["zero", "accelz"])
def test_it_is_a_module_too(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert f"Usage: {module}" in done.stdout


def test_help_is_shown_as_it_is_written() -> None:
    told = run("check", "--help").stdout
    assert "accelz-zero[conformance]" in " ".join(told.split())
    lines = [line.strip() for line in run("convert", "--help").stdout.splitlines()]
    begin = lines.index("A checkpoint of zero's made here has no optimizer state:")
    assert all(len(line) > 70 for line in lines[begin + 1 : begin + 3]), "its lines are filled"


def test_consolidate_writes_weights_and_says_what(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("consolidate", checkpoint.parent, out, "--dtype", "bf16", "--verify")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{out}: 2 tensors, 1.2 kB in 1 file")
    assert "head._extra_state" in result.stderr
    assert saved.same(saved.read(out), saved.cast(MODEL, torch.bfloat16))
    result = run("consolidate", checkpoint, out, "--overwrite", "--max-shard-size", "1kB", "--workers", "1")
    assert result.exit_code == 0, result.output
    assert saved.same(saved.read(out), MODEL)
    assert len(saved.weight_map(out)) == 2


def test_convert_makes_a_checkpoint_that_can_be_read(checkpoint: Path, tmp_path: Path) -> None:
    assert run("consolidate", checkpoint, tmp_path / "weights").exit_code == 0
    assert "no checksums" in run("verify", tmp_path / "weights").stdout
    result = run("convert", tmp_path / "weights", tmp_path / "begin")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path / 'begin'}: 2 tensors, 2.4 kB\n"
    assert run("verify", tmp_path / "begin").stdout == f"{tmp_path / 'begin'}: intact\n"
    result = run("consolidate", tmp_path / "begin", tmp_path / "torch", "--format", "torch")
    assert result.exit_code == 0, result.output
    found = torch.load(tmp_path / "torch" / "pytorch_model.bin", weights_only=True)
    assert saved.same(found, MODEL)


def test_convert_to_a_universal_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    result = run("convert", checkpoint.parent, tmp_path / "universal", "--to", "universal")
    assert result.exit_code == 0, result.output
    assert run("consolidate", tmp_path / "universal", tmp_path / "out").exit_code == 0
    assert saved.same(saved.read(tmp_path / "out"), MODEL)
    assert run("consolidate", checkpoint, tmp_path / "weights").exit_code == 0
    message = refused("convert", tmp_path / "weights", tmp_path / "other", "--to", "universal")
    assert "not a complete checkpoint" in message


def test_part_of_a_model_is_never_passed_off_as_the_whole(tmp_path: Path) -> None:
    base = [f"base.{n}" for n in range(9)]
    synthetic.save(tmp_path / "part", MODEL, left_out=base)
    told = "saved without: base.0, base.1"
    for number, command in enumerate(["consolidate", "convert", "convert --to universal"]):
        result = run(*command.split(), tmp_path / "part", tmp_path / f"out-{number}")
        assert result.exit_code == 0, result.output
        assert told in result.stderr
        assert "and 1 more" in result.stderr
    assert told in run("consolidate", tmp_path / "out-1", tmp_path / "again").stderr
    assert "without     base.0, base.1" in run("inspect", tmp_path / "part").stdout
    assert json.loads(run("inspect", tmp_path / "part", "--json").stdout)["saved_without"] == base


def test_what_is_excluded_is_told_and_known_to_be_left_out(checkpoint: Path, tmp_path: Path) -> None:
    for number, command in enumerate(["consolidate", "convert", "convert --to universal"]):
        result = run(*command.split(), checkpoint, tmp_path / f"out-{number}", "--exclude", "embedding.*")
        assert result.exit_code == 0, result.output
        assert "left out by --include and --exclude: embedding.weight\n" in result.stderr
    described = json.loads(run("inspect", tmp_path / "out-1", "--json").stdout)
    assert described["saved_without"] == ["embedding.weight"]
    assert [tensor["name"] for tensor in described["tensors"]] == ["scale"]


def test_inspect_tells_what_is_there(checkpoint: Path) -> None:
    result = run("inspect", checkpoint)
    assert result.exit_code == 0
    for text in ("embedding.weight", "[20, 30]", "F32", "world size", "step-7"):
        assert text in result.stdout, text
    described = json.loads(run("inspect", checkpoint, "--json").stdout)
    assert time.strftime("%Y-%m-%d %H:", time.localtime(described["created"])) in result.stdout
    assert described["steps"] == 1
    assert described["world size"] == 2
    assert [(t["name"], t["shape"], t["bytes"]) for t in described["tensors"]] == [
        ("embedding.weight", [20, 30], 2400),
        ("scale", [1], 4),
    ]


def test_a_directory_without_a_name_may_be_meant(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint)
    assert run("verify", ".").exit_code == 0
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for path in (".", "/", ".."):
        assert "not a complete checkpoint" in refused("inspect", path)


def test_verify_names_every_damaged_file(checkpoint: Path) -> None:
    result = run("verify", checkpoint)
    assert (result.exit_code, result.stdout) == (0, f"{checkpoint}: intact\n")
    for rank in (0, 1):
        path = checkpoint / f"rank-0000{rank}.safetensors"
        data = bytearray(path.read_bytes())
        data[8 + int.from_bytes(data[:8], "little") + 1] ^= 1
        path.write_bytes(data)
    result = run("verify", checkpoint)
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 2
    assert all(f"rank-0000{rank}.safetensors" in result.stdout for rank in (0, 1))


def test_errors_are_one_message(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "no checkpoint" in refused("inspect", tmp_path)
    assert "no checkpoint" in refused("verify", tmp_path / "nowhere")
    assert "'5 parsecs' is not a size" in refused(
        "consolidate", checkpoint, out, "--max-shard-size", "5 parsecs"
    )
    assert "File name too long" in refused("inspect", tmp_path / ("x" * 300))
    (tmp_path / "odd" / "latest").mkdir(parents=True)
    assert "latest cannot be read: [Errno 21]" in refused("inspect", tmp_path / "odd")
    shutil.rmtree(tmp_path / "odd")
    assert "there is no directory" in refused("consolidate", checkpoint, tmp_path / "a" / "b")
    assert "no tensor name matches" in refused("consolidate", checkpoint, out, "--exclude", "nothing")
    (checkpoint / "rank-00001.safetensors").unlink()
    assert "rank-00001.safetensors is missing" in refused("consolidate", checkpoint, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs"]


def test_what_the_system_refuses_is_one_message(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("zero.sources.opening.open_source", denied)
    for command in ("inspect", "verify"):
        assert f"error: [Errno 13] Permission denied: '{checkpoint}'" in refused(command, checkpoint)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("17", 17), ("5GB", 5 * 10**9), ("1.5 kB", 1500), ("2MiB", 2 << 20), ("3g", 3 * 10**9)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert sizes.size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "5iB", "-3", "5 parsecs"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(zero.UsageError, match="is not a size"):
        sizes.size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (999, "999 B"),
        (999.6, "1 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (999_700_000, "1 GB"),
        (2.5e12, "2.5 TB"),
    ],
)
def test_sizes_for_people(nbytes: float, text: str) -> None:
    assert sizes.human(nbytes) == text


ODD = "w\x1b]0;title\x07\nfake row"
SHOWN = r"w\x1b]0;title\x07\nfake row"


def test_names_in_files_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    torch.save({ODD: torch.ones(2)}, tmp_path / "odd.pt")
    shown = run("inspect", tmp_path / "odd.pt").stdout
    assert SHOWN in shown.replace("\n", "")
    assert "\x1b" not in shown
    assert json.loads(run("inspect", tmp_path / "odd.pt", "--json").stdout)["tensors"][0]["name"] == ODD
    odd = tmp_path / ODD.replace("/", "")
    assert SHOWN in refused("inspect", odd).replace("\n", "")
    assert run("convert", tmp_path / "odd.pt", odd).stdout.startswith(f"{tmp_path}/{SHOWN}: 1 tensors")


@pytest.mark.parametrize("created", [1e300, -1e300, 1e18, float("nan"), 253_370_764_799.0])
def test_moments_that_no_calendar_has_are_refused(
    checkpoint: Path, created: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC-14")  # east of Greenwich
    time.tzset()
    data = form.unseal("zero-checkpoint", (checkpoint / form.MANIFEST).read_bytes())
    changed = {**json.loads(data), "created": created}
    text = json.dumps(changed)[1:].encode()
    head = form.seal("zero-checkpoint", {}).partition(b"crc32")[0]
    (checkpoint / form.MANIFEST).write_bytes(head + b'crc32":"%08x",\n' % crc32(text) + text)
    result = run("inspect", checkpoint)
    monkeypatch.undo()
    time.tzset()
    if created == 253_370_764_799.0:
        assert "created     9999-01-01 13:59:59+14:00" in result.stdout
    else:
        assert result.exit_code == 2, result.output
        assert "manifest.json cannot be used: created" in " ".join(result.stderr.split())


def test_any_locale_shows_any_name(tmp_path: Path) -> None:
    torch.save({"gewicht é": torch.ones(2)}, tmp_path / "odd.pt")
    command = [sys.executable, "-m", "zero", "inspect", str(tmp_path / "odd.pt")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=True)
    assert r"gewicht \xe9" in done.stdout


def test_what_has_many_names_is_shown_at_once(tmp_path: Path) -> None:
    one = torch.ones(2)
    torch.save({f"n{n}": one for n in range(30_000)}, tmp_path / "many.pt")
    begun = time.process_time()
    lines = run("inspect", tmp_path / "many.pt").stdout.splitlines()
    assert time.process_time() - begun < 10
    assert lines[-30_000].split() == ["n0", "[2]", "F32", "F32", "parameter", "8", "B"]
    assert lines[-1] == "= n29999"
