"""Reads changed files in this process, each with a limit on time and memory; a test starts it.

python -m tests.zero.helpers.read_mutated SEEDS FIRST COUNT. Prints, for each input, its number when it
begins, and a line with what was wrong, if anything. Whatever takes too long ends the process with a
traceback.
"""

from __future__ import annotations

import faulthandler
import json
import pickle
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from typer.testing import CliRunner

import zero
from tests.zero.helpers.mutations import Tree, change
from zero import cli

SECONDS = 60  # of an input, on a machine that does much else; most take a hundredth of one
MEMORY = 768 << 20  # bytes that one may take beyond what was taken before the first
ADDRESSES = 16 << 30


def commands(path: Path, out: Path) -> list[list[str]]:
    few = ["--workers", "1", "--memory", "1MiB"]
    return [
        ["inspect", str(path)],
        ["inspect", str(path), "--json"],
        ["verify", str(path), "--workers", "1"],
        ["consolidate", str(path), str(out), *few],
        ["consolidate", str(path), str(out), *few, "--dtype", "keep", "--format", "torch", "--verify"],
        ["convert", str(path), str(out), *few],
        ["convert", str(path), str(out), *few, "--to", "universal"],
        ["plan", str(path), "--ranks", "2"],
    ]


def run_command(arguments: list[str]) -> Iterator[str]:
    """Run a command; yields what is wrong with its end or with what it prints."""
    result = CliRunner().invoke(cli.app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        yield f"{type(result.exception).__name__}: {str(result.exception)[:200]}"
    if result.exit_code not in (0, 1, 2):
        yield f"exit code {result.exit_code}"
    if not result.output.replace("\n", "").isprintable():
        yield "a terminal may obey what it prints"
    if "--json" in arguments and result.exit_code == 0:
        json.loads(result.stdout, parse_constant=_refuse)


def load_pretrained(path: Path) -> Iterator[str]:
    model = torch.nn.Linear(5, 6)
    try:
        zero.load_pretrained(model, path, rename={"w": "weight", "b": "bias"}.get)
    except zero.ZeroError:
        return
    except Exception as error:
        yield f"load_pretrained: {type(error).__name__}: {str(error)[:200]}"


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def read(seeds: dict[str, Tree], number: int, work: Path, base: int) -> Iterator[str]:
    """Change a file and read it in one way; yields what is wrong."""
    generator = random.Random(number)
    name = generator.choice(list(seeds))
    path = work / name
    change(seeds[name], path, generator)
    ways: list[Callable[[], Iterator[str]]] = [
        lambda arguments=arguments: run_command(arguments)  # type: ignore[misc]
        for arguments in commands(path, work / "out")
    ]
    if name in ("safetensors", "sharded"):
        ways += 3 * [lambda: load_pretrained(path)]
    yield from generator.choice(ways)()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if peak > base + MEMORY:
        yield f"it took {(peak - base) >> 20} MiB"
        sys.exit(0)  # the peak stays, so nothing more can be said here


def main(seeds: dict[str, Tree], first: int, count: int) -> None:
    for arguments in commands(Path("nothing"), Path("nothing")):  # imports
        CliRunner().invoke(cli.app, arguments)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for number in range(first, first + count):
        print(f"begins {number}", flush=True)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        work = Path(tempfile.mkdtemp(prefix="mutated-"))
        try:
            for problem in read(seeds, number, work, base):
                print(f"wrong {number}: {problem!r}", flush=True)
        finally:
            shutil.rmtree(work)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(pickle.loads(Path(sys.argv[1]).read_bytes()), int(sys.argv[2]), int(sys.argv[3]))
