"""The job's ranks: joined once per process, and shared by its engines."""

from __future__ import annotations

import os

from accelz.accelerator import Accelerator
from accelz.collectives import Group
from accelz.errors import CollectiveError
from zero.errors import CommunicationError

_groups: dict[float, tuple[object, Group, Group]] = {}  # timeout -> (the job, for data, for control)


def join(accelerator: Accelerator, timeout: float) -> tuple[Group, Group]:
    """Join the job; returns a group for data and one of the same ranks for control messages.

    The job is what torchrun's environment says, an initialised default process group, or one rank.
    Engines with the same timeout (seconds) use the same groups. Every rank must call this; raises
    CommunicationError when some do not.
    """
    accelerator.bind(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        job = accelerator.collectives.init(timeout).process_group
        known = _groups.get(timeout)
        if known is None or known[0] is not job:
            data, control = (accelerator.collectives.new_group(None, timeout) for _ in range(2))
            assert data is not None
            assert control is not None
            known = _groups[timeout] = (job, data, control)
    except CollectiveError as error:
        raise CommunicationError(
            f"the ranks did not all join the job within {timeout:.0f} s; look for one that ended early. "
            f"Cause here: {error}"
        ) from error
    return known[1], known[2]
