"""Running out of device memory, told with the unit that found no room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from accelz.accelerator import Accelerator
from zero.errors import OutOfMemoryError
from zero.tiers.stores import Stores

T = TypeVar("T")


def allocate(stores: Stores, purpose: str, unit: str, nbytes: int, allocation: Callable[[], T]) -> T:
    """What `allocation` returns; tried once more where state could be moved off the device. See room_for."""
    with room_for(stores.accelerator, purpose, unit, nbytes):
        try:
            return allocation()
        except torch.OutOfMemoryError:
            if not stores.relieve(nbytes):
                raise
        return allocation()


@contextmanager
def room_for(accelerator: Accelerator, purpose: str, unit: str, nbytes: int) -> Iterator[None]:
    """Turn torch's out-of-memory error into one that names the unit.

    purpose: what the memory is for, e.g. "to gather". nbytes: what the unit wanted for it.
    """
    try:
        yield
    except OutOfMemoryError:
        raise
    except torch.OutOfMemoryError as error:
        stats = accelerator.memory.stats()
        raise OutOfMemoryError(
            f"no room {purpose} unit {unit!r}: {nbytes} bytes wanted, {stats.free} free of "
            f"{stats.capacity}. Try smaller batches or units, a 16-bit precision, a higher stage, more ranks"
        ) from error
