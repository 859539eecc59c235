"""A stretch of a trainable group's shard that has one optimizer record; tiers are decided for each.

Named after ZeRO-Infinity's sub-groups (Rajbhandari et al., 2021). A shard whose state stays on the device is
one sub-group; in other tiers a sub-group has a bounded size, and so do the buffers that records pass through.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from zero.tiers.placement import Placement
from zero.tiers.tier import Record, Tier
from zero.tiers.values import Values


class SubGroup:
    """A stretch of a shard.

    window: its elements of the shard. tier: where its record belongs. streamed: the record is on the device
    for its step. shard: this stretch of the shard, in any tier. record: there once the group's shards are
    final.
    """

    shard: Values
    record: Record

    def __init__(self, window: slice, tier: Tier, streamed: bool) -> None:
        self.window = window
        self.tier = tier
        self.streamed = streamed

    @property
    def numel(self) -> int:
        return int(self.window.stop - self.window.start)

    @property
    def shard_serves(self) -> bool:
        """Whether the shard itself is the master."""
        return self.record.master is self.shard

    def of(self, values: Values) -> Values:
        """Return this stretch of (shard_numel,) values; the values themselves if it is all of them.

        A part of a tensor has its own version counter, so that stepping one sub-group does not count as a
        change of another.
        """
        if self.numel == values.numel():
            return values
        return (values.data if isinstance(values, Tensor) else values)[self.window]


def sub_groups(placement: Placement) -> Iterator[SubGroup]:
    """Yield the sub-groups of a trainable group, in the order of the shard; none for a frozen one."""
    begin = 0
    for numel, tier in placement.optimizer:
        yield SubGroup(slice(begin, begin + numel), tier, placement.comes(tier))
        begin += numel
