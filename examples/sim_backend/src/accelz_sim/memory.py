"""torch.sim's memory counters: exact to the byte, of the current device. Nothing is cached."""

from __future__ import annotations

from accelz_sim import _C


def memory_allocated() -> int:
    return _C.counters(_C.current_device())[0]


def max_memory_allocated() -> int:
    return _C.counters(_C.current_device())[1]


def mem_get_info() -> tuple[int, int]:
    """Bytes that are free, and bytes in all."""
    allocated, _, capacity = _C.counters(_C.current_device())
    return max(capacity - allocated, 0), capacity


def reset_peak_memory_stats() -> None:
    _C.reset_peak(_C.current_device())


def empty_cache() -> None:
    """There is no cache."""


def set_capacity(nbytes: int) -> None:
    """Let the current device hold `nbytes` bytes; more raises torch.OutOfMemoryError. Default: 2 GiB."""
    _C.set_capacity(_C.current_device(), nbytes)
