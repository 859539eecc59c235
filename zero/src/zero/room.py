"""Running out of device memory, told with the unit that found no room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from accelz.accelerator import Accelerator
from zero.errors import OutOfMemoryError


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
