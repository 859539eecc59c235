"""torch.sim's streams and events: torch's generic ones, over the guard in csrc/device.cpp.

The default stream runs work at once, every other stream only when something waits for it. So a missing wait
shows every time, by the poison that was in the memory before, and not once in a thousand runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from accelz_sim import _C, NAME


def Stream(priority: int = 0) -> torch.Stream:
    """Create a stream on the current device."""
    return torch.Stream(_current(), priority=priority)


def Event(enable_timing: bool = False) -> torch.Event:
    """Create an event, which once recorded is a point in a stream of the current device."""
    return torch.Event(_current(), enable_timing=enable_timing)


def current_stream() -> torch.Stream:
    return torch.accelerator.current_stream()


def stream(stream: torch.Stream) -> AbstractContextManager[Any]:
    """Make a stream current inside a with block."""
    return stream


def _current() -> torch.device:
    return torch.device(NAME, _C.current_device())
