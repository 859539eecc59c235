"""Which forwards are under way, where no hook has told of their end.

torch calls a module's forward hooks when its forward returns or raises an Exception. KeyboardInterrupt,
SystemExit and the like go past them, and hooks may have been removed. What still runs then is on the stack of
some thread. (The life of an object made in the call tells nothing: a traceback keeps it.)
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator
from types import FrameType

from torch import nn

_CALL = nn.Module._call_impl.__code__


def calls_under_way(modules: Container[nn.Module]) -> int:
    """Calls of these modules, in all threads. Takes as long as stacks are deep, about 0.1 ms."""
    return sum(frame.f_locals["self"] in modules for frame in _frames() if frame.f_code is _CALL)


def _frames() -> Iterator[FrameType]:
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            yield frame
            frame = frame.f_back
