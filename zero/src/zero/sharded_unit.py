"""A unit's life: SHARDED -> GATHERING -> GATHERED -> SHARDED, once per dtype it is needed in.

A unit is gathered in a *cast*: None for the parameters' own dtypes, or an autocast dtype for its fp32
groups. Nearly always one cast is alive; two may be when forwards under different autocast settings await
one backward, because autograd has saved views of both buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import nn

from zero.communicator import Communicator, NamedHandle
from zero.flat_group import FlatGroup
from zero.guard import guard, unguard


class State(Enum):
    """What each state holds, in bytes per rank, for a buffer of B bytes over W ranks.

    Where the ranks have memory in common it is B for all of them together, in every state.
    """

    SHARDED = "B/W: the shard"
    GATHERING = "B/W + B: the shard, and the whole buffer being filled"
    GATHERED = "B/W + B: the shard, and the whole buffer with the parameters as its views"


class ShardedUnit:
    """The flat groups that are gathered and released together.

    resident: the parameters are always whole (stages 0 to 2, one rank, persistent units).
    holds: users that need the unit gathered now: a forward under way, or a `zero.gathered` block.
    calls_in_backward: forward calls whose backward has begun and is not over.
    persistent: casts whose buffers a release leaves alone, until the weights change.
    """

    def __init__(
        self,
        index: int,
        name: str,
        anchors: Sequence[nn.Module],
        groups: Sequence[FlatGroup],
        communicator: Communicator,
        resident: bool,
    ) -> None:
        self.index = index
        self.name = name
        self.anchors = tuple(anchors)
        self.groups = tuple(groups)
        self.resident = resident
        self.holds = 0
        self.calls_in_backward: set[object] = set()
        self.persistent: set[torch.dtype | None] = set()
        self._communicator = communicator
        self._classes = {p: type(p) for g in groups for p in g.parameters}
        self._pending: dict[torch.dtype | None, list[NamedHandle]] = {}
        self._gathered: set[torch.dtype | None] = set()
        self._stale = False  # the weights have changed: nothing gathered before may stay
        self._bound: torch.dtype | None = None
        self._castable = any(g.dtype is torch.float32 for g in groups)

    @property
    def common(self) -> bool:
        """Whether a rank's shard is part of memory that other ranks read."""
        return any(group.home.common for group in self.groups)

    @property
    def in_use(self) -> bool:
        return bool(self.holds or self.calls_in_backward)

    def state(self, cast: torch.dtype | None = None) -> State:
        if self.resident or cast in self._gathered:
            return State.GATHERED
        return State.GATHERING if cast in self._pending else State.SHARDED

    @property
    def idle(self) -> bool:
        """Nothing gathered or on its way."""
        return not (self._pending or self._gathered)

    def cast_for(self, autocast: torch.dtype | None) -> torch.dtype | None:
        """The cast to gather in while autocast is on with this dtype (None: off)."""
        return autocast if self._castable and autocast is not torch.float32 else None

    def start_gather(self, cast: torch.dtype | None) -> None:
        """Issue the gather unless it is done or under way."""
        if self.state(cast) is State.SHARDED:
            handles = self._pending.setdefault(cast, [])  # a failure half-way leaves what to wait for
            for group in self.groups:
                handle = group.start_gather(self._communicator, cast)
                if handle is not None:
                    handles.append(handle)

    def gather(self, cast: torch.dtype | None) -> None:
        """Make the parameters whole in `cast`, waiting for the gather if need be."""
        if not self.resident:
            self.complete(cast)
            self._unguard()
            self._bind(cast)

    def complete(self, cast: torch.dtype | None) -> None:
        """Fill the buffers of `cast`, waiting for the gather if need be; the parameters may show others."""
        if self.resident:
            return
        self.start_gather(cast)
        for handle in self._pending.get(cast, ()):
            handle.wait()
        if self._pending.pop(cast, None) is not None:
            self._gathered.add(cast)

    def release(self) -> None:
        """Drop every gathered buffer that is not to persist, unless somebody uses the unit."""
        if self.resident or self.in_use or self.idle:
            return
        if self._pending and self._communicator.failed:
            return  # a transfer that cannot be waited for may still write: its buffer must stay
        for handles in self._pending.values():
            for handle in handles:
                handle.wait()
        stay = set() if self._stale else self.persistent & self._gathered
        for group in self.groups:
            kept = {group.dtype_in(cast) for cast in stay}
            for cast in (*self._pending, *self._gathered):
                if group.dtype_in(cast) not in kept:
                    group.release(cast)
        self._pending.clear()
        self._gathered = stay
        self._stale = False
        self._bind(None)
        self._guard()

    def invalidate(self) -> None:
        """The weights change: drop what persists, at once or when the last user is done."""
        self._stale = not self.idle
        self.release()
        self.take_back()

    def begin_write(self) -> None:
        """Before shards change: nothing gathered is to stay, and the device has read those on the host."""
        self.invalidate()
        for group in self.groups:
            group.await_reads()

    @property
    def away(self) -> bool:
        """Whether shards are not on the device."""
        return any(group.placement.params != "device" for group in self.groups)

    def bring(self) -> None:
        """Begin to move shards that are away towards the device, for a gather; ends with `take_back`."""
        if self.idle:
            for group in self.groups:
                group.bring()

    def take_back(self) -> None:
        """The device need not have the shards any more."""
        for group in self.groups:
            group.take_back()

    def settle(self) -> None:
        """From freshly flattened to resident, or to SHARDED, where only shards remain."""
        for group in self.groups:
            group.settle(self.resident, self._communicator.group)
        if not self.resident:
            self._guard()

    def refresh(self) -> list[NamedHandle]:
        """Begin to spread updated shards into the whole buffers of a resident unit."""
        if not self.resident:
            return []
        begun = [
            g.start_gather(self._communicator, None) for g in self.groups if g.trainable and g.shards > 1
        ]
        return [handle for handle in begun if handle is not None]

    def park(self) -> None:
        """Give the device's memory back; see `Engine.offload_states`."""
        for group in self.groups:
            group.park()
        self._guard()

    def unpark(self) -> list[NamedHandle]:
        """End park(); handles of what the other ranks send."""
        for group in self.groups:
            group.unpark(whole=self.resident)
        if not self.resident:
            return []
        self._unguard()
        begun = [g.start_gather(self._communicator, None) for g in self.groups if g.shards > 1]
        return [handle for handle in begun if handle is not None]

    def abandon(self) -> None:
        """Forget all users and release: after an exception, or when a forward never got its backward."""
        self.holds = 0
        self.calls_in_backward.clear()
        self.release()

    def _bind(self, cast: torch.dtype | None) -> None:
        if cast != self._bound:
            for group in self.groups:
                group.bind(cast)
            self._bound = cast

    def expose(self) -> None:
        """Let the parameters look like any others, whole or not: for a tracer, which reads no values."""
        self._unguard()

    def conceal(self) -> None:
        """End `expose`."""
        if not (self.resident or (self.in_use and self._bound in self._gathered)):
            self._guard()

    def _guard(self) -> None:
        guard(self._classes)

    def _unguard(self) -> None:
        unguard(self._classes.keys(), self._classes.values())
