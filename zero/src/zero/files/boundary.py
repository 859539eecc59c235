"""Where errors become zero's own: a file that may hold anything may provoke anything in what reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from zero.errors import CheckpointError, CorruptCheckpointError, ZeroError


@contextmanager
def typed(path: Path, what: str = "makes no sense", advice: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Let the block raise typed errors only; what it reads lies at `path`.

    Errors of zero pass. Raises CheckpointError for errors of the system, and CorruptCheckpointError for all
    others, which says that the path `what`. advice: the end of both messages. Calls of the user's functions
    do not belong in the block.
    """
    try:
        yield
    except ZeroError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}{advice()}") from error
    except Exception as error:
        raise CorruptCheckpointError(f"{path} {what}: {_told(error)[:_LONGEST]}{advice()}") from error


def _told(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


_LONGEST = 500  # characters of a foreign error's message
