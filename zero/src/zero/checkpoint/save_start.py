"""The beginning and end of a save: all ranks start it, or all raise what keeps one of them from it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any
from zlib import crc32

from zero.checkpoint.save_messages import JOINED, SaveMessages
from zero.errors import CommunicationError, RankMismatchError, ZeroError
from zero.loading.together import Problem, error_of, problem_of

_log = logging.getLogger("zero")
PART = "rank {} could not save its part of the checkpoint"
LAST = 3.0  # timeouts to wait for rank 0's word: it may itself be waiting for a rank that is gone


def start(messages: SaveMessages, chosen: Collection[str]) -> None:
    """Wait until all ranks have come. Raises, on every rank, what keeps any of them from the save.

    chosen: the names of what is saved of the model, which has to be the same on every rank.
    """
    messages.publish(JOINED, [[], [len(chosen), crc32("\n".join(sorted(chosen)).encode(errors="replace"))]])
    try:
        problem = _first_problem(messages) if messages.rank == 0 else _word_of_rank_0(messages)
    except BaseException as error:  # of this rank: it has waited too long, or was interrupted
        refuse(messages, error)
        raise
    if problem:
        _leave(messages, problem)
        raise error_of(problem)


def refuse(messages: SaveMessages, error: BaseException) -> ZeroError:
    """Tell the others what keeps this rank from the save. Returns it as the error for this rank to raise."""
    rank = messages.rank
    mine = problem_of(error, PART.format(rank))
    told = [mine[0], f"rank {rank}: {mine[1]}"] if isinstance(error, ZeroError) else mine
    with suppress(CommunicationError):  # without a store, nobody can be told
        messages.publish(JOINED, [told, []])
        if rank:
            messages.publish("file", {"problem": told})  # for a rank 0 that has just found all ranks ready
        else:
            messages.publish("start", told)
        if rank or isinstance(error, Exception):  # rank 0 waits, but not when it is interrupted
            _leave(messages, told)
    return error_of(mine)


def _word_of_rank_0(messages: SaveMessages) -> Problem:
    problem: Problem = messages.collect(JOINED, [0])[0][0]
    return problem or messages.collect("start", [0], LAST)[0]


def _first_problem(messages: SaveMessages) -> Problem:
    """On rank 0: learn what keeps any rank from the save, and tell the others."""
    try:
        said = messages.collect(JOINED, messages.ranks)
        problem: Problem = next((said[rank][0] for rank in messages.ranks if said[rank][0]), [])
        problem = problem or _difference(said)
    except CommunicationError as error:
        problem = problem_of(error, "")
    messages.publish("start", problem)
    return problem


def _difference(said: Mapping[int, Any]) -> Problem:
    """That a rank saves other names of the model than rank 0, if one does."""
    for rank, (_, chosen) in sorted(said.items()):
        if chosen != said[0][1]:
            return problem_of(
                RankMismatchError(
                    f"rank {rank} would save {chosen[0]} names of the model, and rank 0 {said[0][1][0]} "
                    "others: every rank must pass the same trainable_only and include"
                ),
                "",
            )
    return []


def _leave(messages: SaveMessages, problem: Problem) -> None:
    """Part without a save. Rank 0 waits until the others know."""
    if messages.rank:
        messages.publish("leave", None)
    elif problem[0] != CommunicationError.__name__:  # otherwise nobody may be there
        take_leave(messages)


def take_leave(messages: SaveMessages) -> None:
    """Wait until every rank has read the outcome, since rank 0's process may hold the store."""
    others = messages.ranks[1:]
    try:
        messages.collect("leave", others)
        messages.forget("leave", others)
        for topic in (JOINED, "file"):
            messages.forget(topic, messages.ranks)
        for topic in ("start", "directory", "outcome"):
            messages.forget(topic, [0])
    except CommunicationError as error:
        _log.warning("the checkpoint's outcome is settled, but %s", error)
