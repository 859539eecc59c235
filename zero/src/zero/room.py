"""Running out of device memory, told with the unit that found no room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from accelz.accelerator import Accelerator
from zero.errors import ZeroError
from zero.tiers.stores import Stores

T = TypeVar("T")


class OutOfMemoryError(ZeroError, torch.OutOfMemoryError):
    """The device has no room for a unit. Names the unit, the bytes wanted and the bytes free.

    During init nothing is trained yet: free the model and try a smaller configuration. After an error in
    forward or backward the engine stays usable. After one in step some parameters are updated and others
    are not: the engine refuses to go on until a checkpoint is loaded.
    """


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
