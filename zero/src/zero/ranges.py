"""Ranges for profilers: what the engine does, phase by phase, named after the unit that it does it for.

`torch.profiler` shows them among the operations, and under `torch.autograd.profiler.emit_nvtx` they are NVTX
ranges. A vendor's own profiler, which torch does not know of, is shown them where ZERO_RANGES=1 asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

PREFIX = "zero::"
"""How the ranges' names begin."""
_NOTHING = nullcontext()

_of_device: Callable[[str], AbstractContextManager[None]] | None = None
"""The accelerator's `profiler_range`, while ranges are to be shown there."""


def show_by(of_device: Callable[[str], AbstractContextManager[None]] | None) -> None:
    """Show ranges by an accelerator's `profiler_range` too from now on; None: no longer."""
    global _of_device
    _of_device = of_device


def ranged(phase: str, unit: str = "") -> AbstractContextManager[None]:
    """Wrap a phase, such as "gather", of a unit; "" for one that is of no unit.

    Costs the reading of two variables while no profiler is shown it.
    """
    if profiler._is_profiler_enabled or _of_device is not None:
        return _shown(f"{PREFIX}{phase} {unit}".rstrip())
    return _NOTHING


def in_range(
    phase: str, unit: str | Callable[..., str] = ""
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Make a function one phase. unit: a name, or what tells it from the function's arguments."""

    def made(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            if not (profiler._is_profiler_enabled or _of_device is not None):
                return function(*args, **kwargs)
            with ranged(phase, unit if isinstance(unit, str) else unit(*args, **kwargs)):
                return function(*args, **kwargs)

        return call

    return made


def _shown(name: str) -> AbstractContextManager[None]:
    if _of_device is None:
        return profiler.record_function(name)
    return _shown_in_both(name, _of_device) if profiler._is_profiler_enabled else _of_device(name)


@contextmanager
def _shown_in_both(name: str, of_device: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    with of_device(name), profiler.record_function(name):
        yield
