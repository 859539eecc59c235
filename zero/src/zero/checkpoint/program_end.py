"""How this rank's program has ended, for threads that go on after it."""

from __future__ import annotations

import sys
import threading


def has_failed() -> bool:
    """Whether the main thread is gone, after an exception that nothing caught."""
    uncaught = hasattr(sys, "last_value") or hasattr(sys, "last_exc")
    return uncaught and not threading.main_thread().is_alive()
