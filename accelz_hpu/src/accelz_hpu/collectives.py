"""The collectives role: HCCL for device tensors, gloo for host tensors."""

from __future__ import annotations

from collections.abc import Sequence

from accelz.collectives import Collectives, Group
from accelz.errors import CollectiveError


class HpuCollectives(Collectives):
    """torch's collectives, as far as the bridge lets them through.

    Its init_process_group and new_group take no device_id, group_desc or use_local_synchronization. Where the
    backend of each device type is named, the first two are not needed.
    """

    def __init__(self) -> None:
        super().__init__("cpu:gloo,hpu:hccl")

    def new_group(
        self, ranks: Sequence[int] | None, timeout: float, members_only: bool = False
    ) -> Group | None:
        if members_only:
            raise CollectiveError(
                "the bridge makes groups only where every rank of the job makes them (its new_group takes no "
                "use_local_synchronization): use all ranks of the job, or start a job for each group"
            )
        return super().new_group(ranks, timeout)
