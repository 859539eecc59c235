"""Report running out of device memory together with the unit that found no room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from accelz import Accelerator
from zero.errors import ZeroError
from zero.tiers.stores import Stores

T = TypeVar("T")
SAFETY_EXACT = 0.02  # of the capacity, kept free where memory is counted to the byte
SAFETY = 0.1  # elsewhere: caches, fragments, and what others take


class OutOfMemoryError(ZeroError, torch.OutOfMemoryError):
    """The device has no room for a unit.

    The message names the unit, the bytes wanted and the bytes free; for memory that serves all units at once,
    such as that of the gradients' norm, it names the purpose instead.

    During init nothing is trained yet: free the model, and build it anew for a smaller configuration. After
    an error in forward or backward the engine stays usable. After an error in step either nothing has changed
    and the step may be repeated, or some parameters are updated and others are not, and the engine refuses to
    go on until a checkpoint is loaded.
    """


def allocate(stores: Stores, purpose: str, unit: str | None, nbytes: int, allocation: Callable[[], T]) -> T:
    """Return what `allocation` returns, trying again if state could be moved off the device. See room_for."""
    try:
        return allocation()
    except torch.OutOfMemoryError:
        with room_for(stores.accelerator, purpose, unit, nbytes):
            if not stores.relieve(nbytes):
                raise
            return allocation()


@contextmanager
def room_for(accelerator: Accelerator, purpose: str, unit: str | None, nbytes: int) -> Iterator[None]:
    """Turn torch's out-of-memory error into one that names the unit.

    purpose: what the memory is for, e.g. "to gather". unit: None for memory of no unit. nbytes: bytes
    wanted for it.
    """
    try:
        yield
    except OutOfMemoryError:
        raise
    except torch.OutOfMemoryError as error:
        stats = accelerator.memory.stats()
        what = purpose if unit is None else f"{purpose} unit {unit!r}"
        raise OutOfMemoryError(
            f"out of memory: no room {what}, {nbytes:,} bytes needed, {stats.free:,} of "
            f"{stats.capacity:,} free. Try smaller batches or units, a 16-bit precision, a higher stage or "
            "more ranks"
        ) from error


def scalars(accelerator: Accelerator, purpose: str, count: int) -> tuple[Tensor, ...]:
    """Make `count` zeros, 0-dim fp32 on the device: once, so that no step has to find room for them."""
    with room_for(accelerator, purpose, None, 4 * count):
        return torch.zeros(count, dtype=torch.float32, device=accelerator.device).unbind()


def usable(accelerator: Accelerator) -> int:
    """Bytes of the device that may be planned with, out of what it has and what others leave of that."""
    stats = accelerator.memory.stats()
    safety = SAFETY_EXACT if accelerator.capabilities.counts_every_byte else SAFETY
    return int(min(stats.capacity, stats.allocated + stats.free) * (1 - safety))
