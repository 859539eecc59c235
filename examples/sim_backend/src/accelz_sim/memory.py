"""torch.sim's memory counters for the current device, exact to the byte. Nothing is cached."""

from __future__ import annotations

from accelz_sim import _C


def memory_allocated() -> int:
    return _C.counters(_C.current_device())[0]


def max_memory_allocated() -> int:
    return _C.counters(_C.current_device())[1]


def mem_get_info() -> tuple[int, int]:
    """Return the free and the total bytes."""
    allocated, _, capacity = _C.counters(_C.current_device())
    return max(capacity - allocated, 0), capacity


def reset_peak_memory_stats() -> None:
    _C.reset_peak(_C.current_device())


def empty_cache() -> None:
    """Do nothing: there is no cache."""


def set_capacity(nbytes: int) -> None:
    """Let the current device hold `nbytes` bytes (default 2 GiB); more raises torch.OutOfMemoryError."""
    _C.set_capacity(_C.current_device(), nbytes)
