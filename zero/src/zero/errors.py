"""Errors of the engine. Each says what was expected, what came and what to do."""

from collections.abc import Sequence


def some(names: Sequence[str], limit: int = 8) -> str:
    """The first few names for a message, and how many more there are."""
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
    """The values of a parameter were touched while only its shards exist."""


class UsageError(ZeroError):
    """Engine calls in an order that has no meaning, such as step() without backward()."""


class StateError(ZeroError):
    """A state dict or checkpoint does not fit the model or the optimizer."""


class CheckpointError(ZeroError):
    """A checkpoint is not there, is not complete, or could not be written."""


class CorruptCheckpointError(CheckpointError):
    """Bytes of a checkpoint are not those that were written. The message names the file and the tensor."""


class OffloadError(ZeroError):
    """State could not be kept on, or brought back from, the host or the disk."""


class CommunicationError(ZeroError):
    """A collective failed. The message names the unit and the ranks concerned."""


class RankMismatchError(CommunicationError):
    """Ranks issued different collectives. The message names the first difference by rank and unit."""
