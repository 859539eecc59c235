"""A stretch of a trainable group's shard that has one optimizer record: what tiers are decided for.

Named after ZeRO-Infinity's sub-groups (Rajbhandari et al., 2021). A shard whose state stays on the device is
one sub-group; elsewhere a sub-group has a bounded size, and so do the buffers that records pass through.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from zero.settings.offload import Tier
from zero.tiers.placement import Placement
from zero.tiers.record import Record
from zero.tiers.values import Values


class SubGroup:
    """window: elements of the shard. tier: where the record belongs. visits: it is on the device for its
    step. shard: this stretch of the shard, wherever that is."""

    shard: Values

    def __init__(self, window: slice, tier: Tier, visits: bool) -> None:
        self.window = window
        self.tier: Tier = tier
        self.visits = visits
        self.record: Record | None = None

    @property
    def numel(self) -> int:
        return int(self.window.stop - self.window.start)

    @property
    def kept(self) -> Record:
        """The record, which there is once its group has settled."""
        assert self.record is not None
        return self.record

    @property
    def shard_serves(self) -> bool:
        """Whether the shard itself is the master."""
        return self.kept.master is self.shard

    def follow(self, shard: Values) -> None:
        """The group has another shard."""
        self.shard = self.of(shard)

    def of(self, values: Values) -> Values:
        """This stretch of (shard_numel,) values; themselves where it is all of them.

        A part of a tensor counts changes by itself, so that stepping one sub-group is no change of another.
        """
        if self.numel == values.numel():
            return values
        return (values.data if isinstance(values, Tensor) else values)[self.window]


def sub_groups(placement: Placement) -> Iterator[SubGroup]:
    """The sub-groups of a trainable group, in the order of the shard; of a frozen one none."""
    begin = 0
    for numel, tier in placement.optimizer:
        yield SubGroup(slice(begin, begin + numel), tier, placement.visits and tier == "host")
        begin += numel
