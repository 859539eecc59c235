"""Calls of the command `zero`, and what they refuse."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from zero import cli


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], env={"COLUMNS": "80"})


def refused(*arguments: object) -> str:
    """The message of a command that fails, in one line."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())
