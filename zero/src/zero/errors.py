"""Errors of the engine. Each message says what was expected, what was found and what to do."""

from collections.abc import Sequence


def some(names: Sequence[str], limit: int = 8) -> str:
    """Format the first `limit` names for a message, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


class ZeroError(RuntimeError):
    """Base of every error that zero raises on purpose."""


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


class CheckpointError(ZeroError):
    """A checkpoint is missing, is incomplete, or could not be written."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint's bytes differ from those that were written. The message names the file and the tensor."""


class OffloadError(ZeroError):
    """State could not be kept on, or brought back from, the host or the disk."""


class CommunicationError(ZeroError):
    """A collective failed. The message names the unit and the ranks concerned."""


class RankMismatchError(CommunicationError):
    """Ranks issued different collectives. The message names the first difference by rank and unit."""
