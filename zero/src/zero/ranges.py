"""Ranges for profilers: what the engine does, phase by phase, named after the unit that it does it for.

`torch.profiler` shows them among the operations, and under `torch.autograd.profiler.emit_nvtx` they are NVTX
ranges.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

PREFIX = "zero::"
"""How the ranges' names begin."""
_NOTHING = nullcontext()


def ranged(phase: str, unit: str = "") -> AbstractContextManager[None]:
    """Wrap a phase, such as "gather", of a unit; "" for one that is of no unit.

    Costs the reading of an attribute while no profiler runs.
    """
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"{PREFIX}{phase} {unit}".rstrip())
    return _NOTHING


def in_range(
    phase: str, unit: str | Callable[..., str] = ""
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Make a function one phase. unit: a name, or what tells it from the function's arguments."""

    def made(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            if not profiler._is_profiler_enabled:
                return function(*args, **kwargs)
            with ranged(phase, unit if isinstance(unit, str) else unit(*args, **kwargs)):
                return function(*args, **kwargs)

        return call

    return made
