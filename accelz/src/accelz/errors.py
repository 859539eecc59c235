"""Errors between a user, accelz and a backend. Every message says what to do about it."""


class AccelzError(RuntimeError):
    """Base of every error that accelz raises on purpose."""


class BackendError(AccelzError):
    """A backend is installed but broken: import, descriptor, API version or load failed."""


class BackendNotFoundError(AccelzError):
    """No backend of the requested name is installed."""


class BackendUnavailableError(AccelzError):
    """The requested backend is installed, but its device cannot be used here (or no backend can)."""


class SelectionError(AccelzError):
    """The process already runs on another accelerator, or a selection cannot be made."""


class CollectiveError(AccelzError):
    """A collective failed: a rank died, a timeout passed, or the arguments do not fit the group."""
