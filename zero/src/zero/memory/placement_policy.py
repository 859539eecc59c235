"""Where optimizer state is from step to step, and what happens when a forward or backward finds no room.

Static: it stays where the settings put it. Auto: `offload="auto"`, see `balance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from zero.communication.communicator import Communicator
from zero.gradients.reducer import GradientReducer
from zero.memory.balance import Balancer
from zero.memory.memory_tracer import MemoryTracer
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.sharding.sharded_unit import ShardedUnit
from zero.tiers.room import OutOfMemoryError
from zero.tiers.stores import Stores


class StaticPlacementPolicy:
    """balancer: what moves records between steps; None for nothing."""

    balancer: Balancer | None = None

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._accelerator = stores.accelerator

    def forward(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], recover: Callable[[], None]
    ) -> Any:
        """Call the module. recover(): drops gradients, gathers and calls under way; called before an error
        that asks for all micro-batches to be repeated."""
        return module(*args, **kwargs)

    def repeating(self) -> AbstractContextManager[None]:
        """Around autograd's run."""
        return nullcontext()

    def before_step(self) -> None:
        """The optimizer begins."""

    def after_step(self) -> None:
        """Collective. The optimizer has stepped."""

    def pause(self) -> None:
        """The state leaves the device: until `resume`, others use its memory."""

    def resume(self) -> None:
        """The state is back."""

    def make_room(self, error: torch.OutOfMemoryError) -> None:
        """Move all state that can be moved off the device; raise `error` if there is none."""
        if not self._stores.relieve(self._accelerator.memory.stats().capacity):
            raise error


class AutoPlacementPolicy(StaticPlacementPolicy):
    """Moves records by measurement, and repeats what has found no room once they have made some.

    watched: modules whose operations are repeated one by one.
    """

    balancer: Balancer

    def __init__(
        self,
        stores: Stores,
        units: Sequence[ShardedUnit],
        communicator: Communicator,
        tracer: MemoryTracer,
        optimizer: ShardedOptimizer,
        reducer: GradientReducer,
        watched: Iterable[nn.Module],
    ) -> None:
        super().__init__(stores)
        self.balancer = Balancer(stores, communicator, tracer, optimizer, reducer)
        self._units = units
        self._alone = communicator.group.size == 1
        self._watched = tuple(dict.fromkeys(watched))
        self.balancer.oom_retry.watch(self._watched)

    def forward(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], recover: Callable[[], None]
    ) -> Any:
        before = self._accelerator.rng.get_state()
        try:
            return module(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            for unit in self._units:
                unit.release()  # what was gathered ahead; the forward's hooks have released the rest
            self.make_room(error)
            if not self._alone:
                recover()
                raise asking_to_repeat("forward") from error
        self._accelerator.rng.set_state(before)
        return module(*args, **kwargs)

    def repeating(self) -> AbstractContextManager[None]:
        return self.balancer.oom_retry.on() if self._watched else nullcontext()

    def before_step(self) -> None:
        self.balancer.before_step()

    def after_step(self) -> None:
        self.balancer.after_step()

    def pause(self) -> None:
        self.balancer.pause()

    def resume(self) -> None:
        self.balancer.resume()


def asking_to_repeat(what: str) -> OutOfMemoryError:
    """Make the error for a forward or backward that cannot be repeated here, as other ranks would not."""
    return OutOfMemoryError(
        f"out of memory: no room for what the {what} computes. All optimizer state of this rank has now "
        "moved to the host: if every rank reports this, repeat the micro-batches of this optimizer step on "
        "all of them; if other ranks went on, they will time out waiting for this one: start a new job from "
        "a checkpoint"
    )
