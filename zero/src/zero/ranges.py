"""Ranges for profilers: what the engine does, phase by phase, named after the unit that it does it for.

`torch.profiler` shows them among the operations, and under `torch.autograd.profiler.emit_nvtx` they are NVTX
ranges.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_NOTHING = nullcontext()


def ranged(phase: str, unit: str = "") -> AbstractContextManager[None]:
    """Wrap a phase, such as "gather", of a unit; "" for one that is of no unit.

    Costs the reading of an attribute while no profiler runs.
    """
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"zero::{phase} {unit}".rstrip())
    return _NOTHING
