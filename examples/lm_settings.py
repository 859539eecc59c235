"""The command line of train_lm.py: one field, one flag.

    python lm_settings.py RANKS [FLAGS]

says what is wrong with the flags of a run on so many ranks, or what --help asks for. That needs nothing but
Python, and is known before anything is installed or started.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

_OUT = Path("runs/lm")


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. width: a multiple of 2 × heads. context: bytes that it can look back on."""

    layers: int
    width: int
    heads: int
    context: int


def _flag(default: Any, text: str, least: float | None = None, choices: tuple[Any, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": text, "least": least, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """The settings of one run. Raises ValueError for invalid values, saying what would be valid."""

    steps: int = _flag(400, "optimizer steps", least=1)
    batch: int = _flag(16, "rows per step, over all ranks and micro-batches", least=1)
    lr: float = _flag(7e-4, "peak learning rate", least=0)
    layers: int = _flag(4, "transformer blocks", least=1)
    width: int = _flag(448, "features per position", least=1)
    heads: int = _flag(7, "attention heads", least=1)
    context: int = _flag(128, "bytes per row", least=1)
    stage: Literal[0, 1, 2, 3] = _flag(3, "what is sharded: 0 nothing ... 3 everything", choices=(0, 1, 2, 3))
    precision: Literal["fp32", "bf16"] = _flag("bf16", "dtype of the weights", choices=("fp32", "bf16"))
    accumulate: int = _flag(1, "micro-batches per step", least=1)
    clip: float = _flag(1.0, "largest gradient norm; 0 does not clip", least=0)
    offload: Literal["none", "host", "disk", "auto"] = _flag(
        "none", "where optimizer state lives; auto: measured", choices=("none", "host", "disk", "auto")
    )
    swap: Path = _flag(_OUT, "directory for state on disk")  # noqa: RUF009
    seed: int = _flag(0, "for the weights, the batches and the sample", least=0)
    out: Path = _flag(_OUT, "directory of the run")  # noqa: RUF009 (a Path is immutable)
    resume: bool = _flag(False, "continue from the newest checkpoint in --out")
    stop_at: int = _flag(0, "stop after this step, to be resumed; 0: after the last", least=0)
    eval_every: int = _flag(100, "steps between validations; 0: at the end only", least=0)
    eval_bytes: int = _flag(65536, "bytes of validation text to use", least=1)
    save_every: int = _flag(0, "steps between checkpoints; 0: at the end only", least=0)
    sample_bytes: int = _flag(300, "bytes to generate at the end", least=0)
    prompt: str = _flag("def ", "what the generated text starts with")
    max_bytes: int = _flag(0, "bytes of text to read at most, roughly; 0: all", least=0)

    def __post_init__(self) -> None:
        for flag in fields(self):
            least = flag.metadata["least"]
            if least is not None and not getattr(self, flag.name) >= least:
                raise ValueError(
                    f"{_name(flag.name)} must be at least {least}, got {getattr(self, flag.name)}"
                )
        if self.width % (2 * self.heads):
            raise ValueError(
                f"--width {self.width} does not divide into --heads {self.heads} with an even number of "
                f"features each: use a multiple of {2 * self.heads}"
            )
        if not self.prompt and self.sample_bytes:
            raise ValueError("--prompt must not be empty: the sample continues it")
        if self.resume:
            self._check_resumed()

    def check_ranks(self, world_size: int) -> None:
        """Raise ValueError if the batch cannot be shared equally by the ranks."""
        shares = world_size * self.accumulate
        if self.batch % shares:
            raise ValueError(
                f"--batch {self.batch} cannot be divided among {world_size} ranks with --accumulate "
                f"{self.accumulate}: use a multiple of {shares}"
            )

    def _check_resumed(self) -> None:
        numbers = [path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*")]
        taken = max((int(number) for number in numbers if number.isdigit()), default=None)
        if taken is None:
            raise ValueError(f"--resume: there is no checkpoint in {self.out}; start without --resume")
        if taken >= self.last_step:
            raise ValueError(
                f"--resume: the run in {self.out} has taken {taken} steps, and ends after {self.last_step}: "
                "give it more --steps, or start without --resume"
            )

    @property
    def shape(self) -> Shape:
        return Shape(self.layers, self.width, self.heads, self.context)

    @property
    def last_step(self) -> int:
        """The step at which this run ends; the schedule always spans `steps`."""
        return min(self.stop_at or self.steps, self.steps)

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, which are called step-N."""
        return self.out / "checkpoints"


def parse(arguments: Sequence[str]) -> Settings:
    """Return the settings that a command line asks for. Raises ValueError."""
    parser = _Parser(
        prog="train_lm.py",
        description="Train a byte-level language model on Python's own sources, sharded over the ranks of "
        "the job.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for flag in fields(Settings):
        kind = type(flag.default)
        options: dict[str, Any] = {"default": flag.default, "help": flag.metadata["help"]}
        if kind is bool:
            options["action"] = "store_true"
        else:
            options |= {"type": kind, "choices": flag.metadata["choices"]}
        parser.add_argument(_name(flag.name), **options)
    return Settings(**vars(parser.parse_args(arguments)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists the flags)")


def _name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def main() -> int:
    ranks, *flags = sys.argv[1:] or ["none"]
    try:
        settings = parse(flags)
        if not ranks.isdigit() or not int(ranks):
            raise ValueError(f"RANKS is a number of processes, at least 1, not {ranks}")
        settings.check_ranks(int(ranks))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
