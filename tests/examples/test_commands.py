"""The command lines of the documentation: programs take them, and those run that can run here.

Nothing is started for this: the programs' own parsers read them. Lines of blocks have to be complete; those
in running text, such as `zero consolidate`, may leave out arguments.
"""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer
from benchmarks.__main__ import app as benchmarks
from scripts.device_check.__main__ import _arguments
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

import accelz.cli
import zero.cli
from tests.zero.helpers import runs, synthetic
from tests.zero.helpers.flights import flight

pytestmark = pytest.mark.slow  # imports the benchmarks, and draws a report

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$|(?<=\n\n)((?: {4}\S[^\n]*\n)+)", re.DOTALL | re.MULTILINE)
SHELL = ("bash", "sh")
REMARK = re.compile(r"\s+#\s.*|\s{2,}\S.*")  # after a command; blocks have them in columns
INLINE = re.compile(r"`([^`]+)`")
UNWRITTEN = re.compile(r"\.\.\.|…| \[\w+\]")  # what a line leaves to the reader
VARIABLE = re.compile(r'(\w+)="?([^"\n]*)"?')


class Line(NamedTuple):
    """whole: with every argument that the command needs."""

    page: str
    words: tuple[str, ...]
    whole: bool


def pages() -> dict[str, str]:
    """Their texts, but for records of what was: decisions, and the changelog."""
    found = (ROOT.glob(each) for each in ("*.md", "*/README.md", "docs/**/*.md", "examples/*/*.md"))
    names = {path.relative_to(ROOT).as_posix(): path for paths in found for path in paths}
    told = ("CHANGELOG.md", "docs/decisions/")
    return {name: path.read_text() for name, path in sorted(names.items()) if not name.startswith(told)}


def blocks(text: str) -> Iterator[tuple[bool, str]]:
    """Those that may have commands; whether they have nothing else."""
    for language, fenced, indented in BLOCK.findall(text):
        if language in SHELL or indented:
            yield language in SHELL, fenced or indented


def lines() -> Iterator[Line]:
    for page, text in pages().items():
        for pure, block in blocks(text):
            named: dict[str, str] = {}
            for line in block.replace("\\\n", "").splitlines():
                words = without_variables(REMARK.sub("", f" {line.strip()}").strip(), named)
                if words and (pure or words[0] in PROGRAMS):
                    yield Line(page, words, not UNWRITTEN.search(line))
        for code in INLINE.findall(BLOCK.sub("", text)):
            words = without_variables(" ".join(code.split()), {})
            if len(words) > 1 and words[0] in PROGRAMS:
                yield Line(page, words, False)


def without_variables(line: str, named: dict[str, str]) -> tuple[str, ...]:
    """The words of a command, after those that set variables for it. named: by earlier lines; added to."""
    for name, value in named.items():
        line = line.replace(f"${name}", value)
    if alone := VARIABLE.fullmatch(line):
        named[alone[1]] = alone[2]
        return ()
    try:
        words = shlex.split(UNWRITTEN.sub("", line).lstrip("$! "))
    except ValueError:
        return ()  # running text with an apostrophe
    while words and VARIABLE.fullmatch(words[0]):
        del words[0]
    return tuple(words)


# -- what takes the words of each program after its name ----------------------------------------------------


def takes(app: typer.Typer, line: Line, words: tuple[str, ...]) -> None:
    """Raises what the command would tell of."""
    if words[0] in ("--help", "--version"):
        return
    commands: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
    assert words[0] in commands, f"{line}: there is no such command"
    try:
        commands[words[0]].make_context(words[0], list(words[1:]))
    except typer.BadParameter as error:
        if line.whole or type(error).__name__ != "MissingParameter":
            raise
    if "-k" in words:
        chosen = set(re.findall(r"\w+", words[words.index("-k") + 1].lower())) - {"and", "or", "not"}
        assert not [word for word in chosen if word not in names_of_tests(line.words[0])], line


@cache
def names_of_tests(program: str) -> str:
    """Where pytest's -k looks: names of files, classes and tests; and ids, which are texts in these files."""
    folder = ROOT / ("accelz/src/accelz/conformance" if program == "accelz" else "tests/zero")
    found = r'^ *(?:def (test_\w+)|class (Test\w+))|"([\w, -]+)"'
    return " ".join(
        f"{path.relative_to(ROOT)} {re.findall(found, path.read_text(), re.MULTILINE)}"
        for path in folder.rglob("*.py")
    ).lower()


def make(line: Line) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in line.words[1:]:
        name, given, value = word.partition("=")
        assert re.search(
            rf"\$\({name}\)" if given else rf"^[\w ]*\b{name}\b[\w ]*:", makefile, re.MULTILINE
        ), line
        if name == "ARGS" and line.words[1] == "train":
            train_lm(value.split())
        if name == "ARGS" and line.words[1] == "bench":
            takes(benchmarks, line, tuple(value.split()))


def pip(line: Line) -> None:
    """Folders and files are there, and packages of this project have the extras."""
    for word in line.words[2:]:
        package, _, extra = word.removeprefix("./").rstrip("]").partition("[")
        folder = "zero" if package == "accelz-zero" else package.replace("-", "_")
        near = [ROOT / folder, ROOT / package, (ROOT / line.page).parent / package]
        ours = word.startswith(("./", "accelz-")) or "/" in word
        assert not ours or package in OF_READERS or any(each.exists() for each in near), line
        if extra:
            project = tomllib.loads((near[0] / "pyproject.toml").read_text())["project"]
            assert {*extra.split(",")} <= {*project["optional-dependencies"]}, line


def python(line: Line) -> None:
    if line.words[1] == "-m" and line.words[2] == "benchmarks":
        takes(benchmarks, line, line.words[3:])
    elif line.words[1] == "-m":
        module = ROOT / line.words[2].replace(".", "/")
        ours = module.with_suffix(".py").exists() or (module / "__main__.py").exists()
        assert ours or line.words[2] in sys.stdlib_module_names, line


def torchrun(line: Line) -> None:
    given = get_args_parser().parse_args(
        [*line.words[1:], *([] if ".py" in line.words[-1] else ["script.py"])]
    )
    if Path(given.training_script).name == "train_lm.py":
        train_lm(given.training_script_args)
    elif given.training_script not in OF_READERS:
        assert (ROOT / "examples" / given.training_script).exists(), line


def train_lm(arguments: list[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "lm_settings.py"))["parse"](arguments)


OF_READERS = ("accelz_acme", "train.py", "script.py")
PROGRAMS: dict[str, Callable[[Line], object]] = {
    "accelz": lambda line: takes(accelz.cli.app, line, line.words[1:]),
    "kill": lambda line: line,
    "make": make,
    "pip": pip,
    "python": python,
    "scripts/device-check": lambda line: _arguments().parse_args(line.words[1:]),
    "torchrun": torchrun,
    "zero": lambda line: takes(zero.cli.app, line, line.words[1:]),
}


def test_every_command_line_is_one_that_its_program_takes() -> None:
    found = [*lines()]
    assert len(found) > 100
    assert {line.words[0] for line in found} == {*PROGRAMS}
    for line in found:
        PROGRAMS[line.words[0]](line)


def test_blocks_of_commands_have_no_errors_of_syntax() -> None:
    every = "\n".join(block for text in pages().values() for pure, block in blocks(text) if pure)
    subprocess.run(["bash", "-n", "-c", every], check=True, timeout=20)


def test_commands_on_what_a_page_supposes_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model, a checkpoint, a run's metrics, and flights of a job that hangs."""
    (tmp_path / "model.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(8, 8)\n")
    synthetic.save(tmp_path / "runs" / "step-100", {"weight": torch.ones(8, 8)})
    runs.written(tmp_path / "runs" / "a")
    for rank in range(3):
        (tmp_path / "runs" / "a" / "flights").mkdir(exist_ok=True)
        flight(rank, 4).write(tmp_path / "runs" / "a" / "flights")
    monkeypatch.chdir(tmp_path)
    ran = set()
    for words in dict.fromkeys(line.words for line in lines()):
        if words[0] == "zero" and len(words) > 2 and (tmp_path / words[2].partition(":")[0]).exists():
            done = CliRunner().invoke(zero.cli.app, words[1:])
            assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}"
            ran.add(words[1])
    assert ran == {"plan", "consolidate", "convert", "report", "explain-hang"}
    assert (tmp_path / "runs/a/report.html").exists()
