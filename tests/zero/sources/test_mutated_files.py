"""Files of every format, changed at random: errors are typed, and time and memory bounded.

`--mutations 20000` reads as many. An input is made anew from its number: see read_mutated.
"""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

from accelz import selection
from tests.zero.helpers.mutations import Tree, change, make_seeds

pytestmark = pytest.mark.slow  # starts programs

MOST_WRONG = 20  # inputs, after which no more are read


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tree]:
    selection.use("cpu")
    return make_seeds(tmp_path_factory.mktemp("seeds"))


@pytest.mark.timeout(7200)
def test_whatever_is_in_files_errors_are_typed(
    seeds: dict[str, Tree], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "seeds").write_bytes(pickle.dumps(seeds))
    count, next_one = request.config.getoption("--mutations"), 0
    wrong: list[str] = []
    while next_one < count and len(wrong) < MOST_WRONG:
        command = [sys.executable, "-m", "tests.zero.helpers.read_mutated", str(tmp_path / "seeds")]
        numbers = [str(next_one), str(count - next_one)]
        done = subprocess.run(
            [*command, *numbers], check=False, capture_output=True, text=True, errors="replace"
        )
        lines = done.stdout.splitlines()
        begun = [int(line.partition(" ")[2]) for line in lines if line.startswith("begins ")]
        assert begun, done.stderr
        wrong += [line for line in lines if line.startswith("wrong ")]
        if done.returncode:
            wrong.append(f"wrong {begun[-1]}: it ended with {done.returncode}: {done.stderr[-3000:]}")
        next_one = begun[-1] + 1
    assert not wrong, "\n".join(wrong)


def test_inputs_are_made_anew(seeds: dict[str, Tree], tmp_path: Path) -> None:
    for name, tree in seeds.items():
        for folder in ("first", "second"):
            change(tree, tmp_path / folder / name, random.Random(3))
        for path in (tmp_path / "first" / name).rglob("*"):
            other = tmp_path / "second" / path.relative_to(tmp_path / "first")
            assert not path.is_file() or path.read_bytes() == other.read_bytes()
