"""Where errors become zero's own: a file that may hold anything may provoke anything in what reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero.errors import CheckpointError, CorruptCheckpointError, ZeroError


@contextmanager
def typed(path: Path) -> Iterator[None]:
    """Let the block raise typed errors only; what it reads lies at `path`.

    Errors of zero pass. Raises CheckpointError for errors of the system, and CorruptCheckpointError for all
    others. Calls of the user's functions do not belong in the block.
    """
    try:
        yield
    except ZeroError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Exception as error:
        raise CorruptCheckpointError(
            f"{path} makes no sense: {type(error).__name__}: {str(error)[:_LONGEST]}"
        ) from error


_LONGEST = 500  # characters of a foreign error's message
