"""Errors of the engine. Each message says what was expected, what was found and what to do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def printable(value: object, keep: str = "") -> str:
    """Text for a terminal or a log: what these might obey or cannot show is escaped as in Python's strings.

    That is everything but letters, digits, punctuation, symbols and plain spaces: escape codes, line breaks,
    marks that turn the direction of writing, halves of surrogate pairs. keep: characters to leave as they
    are.
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def some(names: Sequence[str], limit: int = 8) -> str:
    """Format the first `limit` names for a message, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(printable, names[:limit])) + more


class ZeroError(RuntimeError):
    """Base of every error that zero raises on purpose. Its message is printable, whatever names are in it."""

    _breaks = "\n"  # messages of several lines are laid out by zero

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*(printable(a, self._breaks) if isinstance(a, str) else a for a in arguments))


class ConfigError(ZeroError, ValueError):
    """A configuration value or key is wrong, or does not fit the device."""


class ModelError(ZeroError):
    """The model cannot be sharded as it is."""


class OptimizerError(ZeroError):
    """The optimizer does not fit the model or cannot work on shards."""


class ShardedParameterError(ZeroError):
    """The values of a parameter were used while only its shards exist."""


class UsageError(ZeroError):
    """The engine was called in a meaningless order, such as step() without backward()."""


class GradientOverflowError(ZeroError):
    """Gradients have overflowed in so many steps in a row that nothing is trained any more."""


class StateError(ZeroError):
    """A state dict or checkpoint does not fit the model or the optimizer."""

    _breaks = ""  # the names are those of files


class CheckpointError(ZeroError):
    """A checkpoint is missing, is incomplete, or could not be written."""

    _breaks = ""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint's bytes differ from those that were written. The message names the file and the tensor."""


class OffloadError(ZeroError):
    """State could not be kept on, or brought back from, the host or the disk."""


class CommunicationError(ZeroError):
    """A collective failed. The message names the unit and the ranks concerned."""


class RankMismatchError(CommunicationError):
    """Ranks issued different collectives. The message names the first difference by rank and unit."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Around imports of what an extra of accelz-zero installs: raise UsageError where that is not here."""
    try:
        yield
    except ImportError as error:
        raise UsageError(f"{error}: pip install 'accelz-zero[{name}]'") from error
