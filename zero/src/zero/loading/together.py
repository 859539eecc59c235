"""Actions that succeed on every rank or raise on every rank; errors as messages between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zero import errors
from zero.communication.communicator import Communicator
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


def all_or_none(
    communicator: Communicator,
    what: str,
    action: Callable[[], Any],
    *,
    everywhere: bool = False,
    doing: str = "load",
) -> list[Any]:
    """Run `action` on every rank and return every rank's result, a JSON value, by rank; if it fails on one,
    all raise. Collective.

    what: it is about, for messages. everywhere: on all ranks of the job, rather than on those of the engine.
    doing: "load", "save" or "check".
    """
    rank = communicator.grid.name(communicator.whole.rank)
    cause: Exception | None = None
    try:
        mine = {"value": action()}
    except Exception as error:
        cause = error
        mine = {"problem": problem_of(error, f"rank {rank} could not {doing} {what}")}
    try:
        results = (communicator.everywhere if everywhere else communicator.all_gather_object)(mine)
        for result in results:
            if "problem" in result:
                raise error_of(result["problem"]) from cause
        return [result["value"] for result in results]
    finally:
        del cause  # its traceback refers to this frame, and so to the engine
