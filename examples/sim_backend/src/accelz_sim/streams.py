"""torch.sim's streams and events: torch's generic ones, over the guard in csrc/device.cpp.

The default stream runs work at once, every other one when somebody waits for it. So a wait that is missing
shows each time, as the poison that was in the memory before, and not once in a thousand runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from accelz_sim import _C, NAME


def Stream(priority: int = 0) -> torch.Stream:
    """A new queue of the current device."""
    return torch.Stream(_current(), priority=priority)


def Event(enable_timing: bool = False) -> torch.Event:
    """A point in a stream of the current device, once recorded."""
    return torch.Event(_current(), enable_timing=enable_timing)


def current_stream() -> torch.Stream:
    return torch.accelerator.current_stream()


def stream(stream: torch.Stream) -> AbstractContextManager[Any]:
    """Makes a stream current inside a with block."""
    return stream


def _current() -> torch.device:
    return torch.device(NAME, _C.current_device())
