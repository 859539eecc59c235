"""The main job, made tiny: the same losses on any ranks and stage, exact resume, clear errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model

from tests.accelz import forked
from tests.zero.helpers import pages

pytestmark = pytest.mark.slow  # starts programs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = str(EXAMPLES / "train_lm.py")
SHAPE = {"layers": 2, "width": 32, "heads": 2, "context": 32}
EVAL_BYTES = 512
TINY = {
    **SHAPE,
    "batch": 4,
    "steps": 6,
    "lr": 1e-2,
    "precision": "fp32",
    "clip": 100.0,  # never reached: where it is, the norm's rounding depends on the sharding
    "max-bytes": 400_000,
    "eval-every": 3,
    "eval-bytes": EVAL_BYTES,
    "sample-bytes": 16,
}
ACROSS_WORLD_SIZES = 1e-5  # relative: fp32 sums are taken in another order


@dataclass(frozen=True)
class Outcome:
    """A finished run: what it printed and what it left."""

    out: Path
    status: int
    printed: str
    errors: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Of steps."""
        return [line for line in self._lines if "event" not in line]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [line for line in self._lines if "event" in line]

    @property
    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [m["loss"] for m in self.metrics if "loss" in m]

    @property
    def validation(self) -> list[float]:
        return [m["validation_loss"] for m in self.metrics if "validation_loss" in m]

    @property
    def sample(self) -> str:
        return self.printed.partition("sample:")[2]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.out / "model.safetensors")


def command(out: Path, *switches: str, **changed: object) -> list[str]:
    """The example's arguments."""
    options = {**TINY, **{k.replace("_", "-"): v for k, v in changed.items()}}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return [*flags, *switches, "--out", str(out)]


def launched(out: Path, ranks: int) -> Outcome:
    """Run the example as its users do."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *launcher, SCRIPT, *command(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Outcome(out, done.returncode, done.stdout, done.stderr)


def train(out: Path, *switches: str, ranks: int = 2, **changed: object) -> Outcome:
    """Run the example in processes that have imported torch already; without torchrun's environment on one
    rank."""
    with tempfile.TemporaryDirectory() as scratch:
        done = forked.job(Path(scratch), Path(SCRIPT), command(out, *switches, **changed), ranks)
    return Outcome(out, done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Six steps on two ranks at stage 3."""
    outcome = launched(tmp_path_factory.mktemp("straight"), ranks=2)
    assert outcome.status == 0, outcome.errors
    return outcome


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = train(tmp_path_factory.mktemp("one"), ranks=1)
    assert outcome.status == 0, outcome.errors
    return outcome


@pytest.fixture
def example_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the example's modules importable, as they are for the script."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_it_learns_and_reports(straight: Outcome) -> None:
    assert len(straight.losses) == 6
    assert straight.losses[-1] < straight.losses[0]
    first = straight.metrics[0]
    assert first["step"] == 1
    assert first["tokens_per_second"] > 0
    assert first["grad_norm"] > 0
    assert [first[f"memory/rank{rank}"] > 0 for rank in range(2)] == [True, True]
    last = f"validation loss {straight.validation[-1]:.3f}"
    assert straight.printed.count(last) == 1, "with the last step"
    assert straight.printed.count("validation loss") == len(straight.validation)
    assert re.search(r"step +3 .* norm [0-9.]+ .* left\n", straight.printed)
    assert straight.sample.strip().startswith("def ")
    assert [event["step"] for event in straight.events if event["event"] == "save"] == [6]
    assert "\x1b" not in straight.printed, "no terminal, no escape codes"


def test_stages_0_and_3_are_bitwise_equal(straight: Outcome, tmp_path: Path) -> None:
    replicated = train(tmp_path, stage=0)
    assert replicated.losses == straight.losses, replicated.errors
    assert replicated.validation == straight.validation
    assert replicated.sample == straight.sample


def test_one_rank_gives_the_same_losses(straight: Outcome, one_rank: Outcome) -> None:
    assert one_rank.losses == pytest.approx(straight.losses, rel=ACROSS_WORLD_SIZES)
    assert one_rank.validation == pytest.approx(straight.validation, rel=ACROSS_WORLD_SIZES)


def test_stop_and_resume_are_bitwise_the_straight_run(straight: Outcome, tmp_path: Path) -> None:
    stopped = train(tmp_path, stop_at=3, save_every=1, sample_bytes=0)
    assert stopped.losses == straight.losses[:3], "the same, run to run"
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-2", "step-3"], "two are kept"
    resumed = train(tmp_path, "--resume")
    assert resumed.losses == straight.losses, resumed.errors
    rates = [[metrics["learning_rate"] for metrics in run.metrics] for run in (resumed, straight)]
    assert rates[0] == rates[1]
    assert resumed.validation == straight.validation
    assert resumed.sample == straight.sample
    assert all(torch.equal(value, straight.weights[name]) for name, value in resumed.weights.items())


def test_state_on_disk_gives_the_same_losses(straight: Outcome, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "--offload", "disk", "--swap", str(tmp_path / "swap"))
    assert run.losses == straight.losses
    assert list((tmp_path / "swap").iterdir()) == []
    traced = [event for event in run.events if event["event"] == "memory"]
    assert [event["step"] for event in traced] == [3]


def test_the_end_says_how_to_draw_the_run(straight: Outcome) -> None:
    told = re.search(r"to see what this run did: (.+)", straight.printed)
    assert told is not None
    done = subprocess.run(told[1].split(), capture_output=True, text=True, timeout=60, check=True)
    drawn = pages.figures(Path(done.stdout.strip()).read_text())
    assert {"Loss", "Throughput", "Memory inside step 3", "Collectives, by unit"} <= set(drawn)
    assert len(pages.rows(drawn["Loss"])) == 6


def test_the_weights_need_no_zero(straight: Outcome, example_modules: None) -> None:
    from lm_data import load_corpus, validation_rows
    from lm_model import LanguageModel
    from lm_settings import Shape

    model = LanguageModel(Shape(**SHAPE))
    load_model(model, straight.out / "model.safetensors")
    text = load_corpus(SHAPE["context"], int(TINY["max-bytes"])).validation
    rows = validation_rows(text, SHAPE["context"], EVAL_BYTES // SHAPE["context"])
    loss = model(rows[:, :-1], rows[:, 1:]).item()
    assert loss == pytest.approx(straight.validation[-1], rel=1e-5)


def test_micro_batches_give_the_same_losses(one_rank: Outcome, tmp_path: Path) -> None:
    split = train(tmp_path, ranks=1, accumulate=2)
    assert split.losses == pytest.approx(one_rank.losses, rel=1e-5), split.errors


def test_a_checkpoint_of_another_model_is_refused(one_rank: Outcome) -> None:
    for change in ({"heads": 4}, {"width": 64}):
        refused = train(one_rank.out, "--resume", ranks=1, steps=7, **change)
        assert refused.status == 2
        assert refused.errors.startswith("error: the checkpoint")
        assert "Traceback" not in refused.errors


def test_a_run_that_is_over_is_not_resumed(one_rank: Outcome, example_modules: None) -> None:
    from lm_settings import parse

    with pytest.raises(ValueError, match=r"has taken 6 steps, and ends after 6: give it more --steps"):
        parse([*command(one_rank.out), "--resume"])
    assert parse([*command(one_rank.out, steps=7), "--resume"]).resume


def test_an_unequal_batch_is_refused_on_all_ranks(tmp_path: Path) -> None:
    refused = train(tmp_path, batch=3)
    assert refused.status != 0
    assert refused.errors.count("error: --batch 3 cannot be divided among 2 ranks") == 1


def test_an_error_that_rank_0_does_not_have_is_said(tmp_path: Path) -> None:
    script = f"""
        import sys
        sys.path.insert(0, {str(EXAMPLES)!r})
        import train_lm
        train_lm.fail(ValueError('local rank 2 has no device'))
    """
    done = forked.python(tmp_path, script, RANK="2", WORLD_SIZE="3")
    assert done.returncode == 2
    assert "error: local rank 2 has no device [rank 2]" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "30", "--heads", "4"], r"--width 30 does not divide into --heads 4"),
        (["--heads", "0"], r"--heads must be at least 1, got 0"),
        (["--steps", "-1"], r"--steps must be at least 1"),
        (["--lr", "nan"], r"--lr must be at least 0"),
        (["--stage", "4"], r"--stage: invalid choice"),
        (["--precision", "fp8"], r"--precision: invalid choice"),
        (["--batch", "many"], r"--batch: invalid int value"),
        (["--depth", "3"], r"unrecognized arguments: --depth"),
        (["--resume", "--out", "/nonexistent/run"], r"--resume: there is no checkpoint in /nonexistent/run"),
        (["--prompt", ""], r"--prompt must not be empty"),
    ],
)
def test_wrong_flags_say_what_is_wrong(arguments: list[str], message: str, example_modules: None) -> None:
    from lm_settings import parse

    with pytest.raises(ValueError, match=message):
        parse(arguments)


@pytest.mark.parametrize(
    ("ranks", "flags", "message"),
    [
        ("2", ["--batch", "3"], "--batch 3 cannot be divided among 2 ranks"),
        ("2", ["--layer", "0"], "--layers must be at least 1, got 0"),
        ("2", ["--stage", "4"], "--stage"),
        ("2", ["--batch", "4", "--accumulate", "2"], ""),
        ("2", ["--help"], ""),
        ("0", [], "at least 1, not 0"),
        ("two", [], "at least 1, not two"),
        ("", [], "at least 1, not none"),
    ],
)
def test_wrong_flags_are_known_before_anything_is_installed(
    ranks: str, flags: list[str], message: str
) -> None:
    """In a Python without packages."""
    command = [sys.executable, "-S", "-I", str(EXAMPLES / "lm_settings.py"), *filter(None, [ranks]), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == (2 if message else 0), ended.stderr
    assert ended.stderr.count("\n") == bool(message)
    assert message in ended.stderr
    assert ended.stdout.startswith("usage: train_lm.py ") is ("--help" in flags)


def test_the_readmes_command_is_one(example_modules: None) -> None:
    from lm_settings import parse

    told = re.findall(r'`make train ARGS="(.+?)"`', (EXAMPLES.parent / "README.md").read_text())
    assert told
    for arguments in told:
        parse(arguments.split())


def test_too_little_text_is_refused(example_modules: None) -> None:
    from lm_data import load_corpus

    with pytest.raises(ValueError, match="too short for context 64"):
        load_corpus(context=64, max_bytes=1)


def test_ranks_and_micro_batches_share_one_global_batch(example_modules: None) -> None:
    from lm_data import load_corpus, shares, training_rows

    text = load_corpus(context=16, max_bytes=300_000).train
    batch = training_rows(text, context=16, rows=12, seed=1, step=5)
    assert torch.equal(batch, training_rows(text, 16, 12, seed=1, step=5))
    assert not torch.equal(batch, training_rows(text, 16, 12, seed=1, step=6))
    for world_size, parts in ((1, 1), (2, 3), (4, 1), (3, 2)):
        micro = [list(shares(batch, parts, rank, world_size)) for rank in range(world_size)]
        whole = torch.cat([rows for part in zip(*micro, strict=True) for rows in part])
        assert torch.equal(whole, batch)
