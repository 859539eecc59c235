"""Errors as JSON values, to be sent from one rank to the others."""

from __future__ import annotations

from zero import errors
from zero.errors import ZeroError

Problem = list[str]  # the name of a class in zero.errors, and the message


def problem_of(error: BaseException, context: str) -> Problem:
    """An error as JSON values. An error that is not zero's becomes a CheckpointError with `context`."""
    if isinstance(error, ZeroError) and hasattr(errors, type(error).__name__):
        return [type(error).__name__, str(error)]
    what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}".removesuffix(": ")
    return ["CheckpointError", f"{context}: {what}"]


def error_of(problem: Problem) -> ZeroError:
    """The error to raise for a problem, which may be another rank's."""
    kind, message = problem
    error = getattr(errors, kind)(message)
    assert isinstance(error, ZeroError)
    return error
