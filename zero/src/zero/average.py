"""An average of the weights while they are trained, sharded as they are: `zero.EMA`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zero.errors import UsageError
from zero.sharding.flat_group import FlatGroup
from zero.sharding.shard_source import fetch
from zero.sharding.sharded_unit import ShardedUnit
from zero.tiers.values import at_least_fp32, lasting

if TYPE_CHECKING:
    from zero.engine import Engine


class EMA:
    """An exponential moving average of the trained weights, in fp32, of which every rank keeps its slices.

        ema = zero.EMA(engine, decay=0.999)
        ...
        optimizer.step()
        ema.update()
        with ema.applied():
            evaluate(model)
        engine.save_checkpoint(path, {"ema": ema})
        engine.load_checkpoint(path, restore={"ema": ema})

    It begins as the weights are. All calls, and the saves and loads, are for all ranks; a checkpoint restores
    it at any number of ranks. It lies where the masters lie, on the host for those on disk, and takes 4 bytes
    for each trained parameter, divided by the ranks that share it. Frozen parameters and buffers are not
    averaged. After `engine.attach` with another optimizer, make it anew. Raises UsageError for a decay
    outside of 0 to 1.

    decay: of the average at an update; may be changed. updates: how many there were.
    slices: by group, (shard_numel,).
    """

    def __init__(self, engine: Engine, decay: float = 0.999) -> None:
        if not 0 <= decay <= 1:
            raise UsageError(f"EMA(decay={decay!r}): expected a number from 0 to 1, such as 0.999")
        self.decay = decay
        self.updates = 0
        self._engine = engine
        self._check_weights("EMA")
        with lasting():
            self.slices: Mapping[FlatGroup, Tensor] = {
                group: self._begun(group) for group in _trained(engine.units)
            }

    def _begun(self, group: FlatGroup) -> Tensor:
        values = group.widest
        return fetch(values, values.device, self._engine._communicator).to(
            at_least_fp32(group.dtype), copy=True
        )

    @torch.no_grad()
    def update(self) -> None:
        """Let the average follow the weights, after an optimizer step. Not collective: slices stay apart."""
        self.check_current()
        self._check_weights("ema.update")
        kept: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for group, average in self.slices.items():
            values = fetch(group.widest, average.device, self._engine._communicator).to(average.dtype)
            if values is group.widest:
                averages, beside = kept.setdefault(average.device, ([], []))
                averages.append(average)
                beside.append(values)
            else:  # a copy, of which there is one at a time
                average.lerp_(values, 1 - self.decay)
        for averages, beside in kept.values():
            torch._foreach_lerp_(averages, beside, 1 - self.decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """In the block, the model has the averages, to be evaluated or saved, as by `save_pretrained`.
        Collective. Backwards, steps, checkpoints and loads raise UsageError there. Gradients from before the
        block are there after it."""
        self._check_weights("ema.applied")
        self.swap()
        try:
            yield
        finally:
            # Not after a change of weights in the block that was interrupted.
            if self._engine._integrity.exchanged is self.slices:
                self.swap()

    def swap(self) -> None:
        """Exchange the weights and the averages, for loops that `applied` does not fit. Collective."""
        self.check_current()
        self._engine._boundary.exchange(self.slices)

    def adopt(self) -> None:
        """Give the model the averages for good, at the end of training. Collective."""
        self._check_weights("ema.adopt")
        self.swap()
        self._engine._integrity.exchanged = None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has of it besides the slices, which every rank saves by itself."""
        return {"decay": self.decay, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.decay, self.updates = state["decay"], state["updates"]

    def check_current(self) -> None:
        """Raise UsageError once the engine has been built anew, for another optimizer."""
        if self.slices.keys() != set(_trained(self._engine.units)):
            raise UsageError(
                "engine.attach(optimizer) has divided the weights anew, and this average has slices of the "
                "old ones: make the average anew, zero.EMA(engine)"
            )

    def check_belongs(self, units: Iterable[ShardedUnit]) -> None:
        """Raise UsageError unless its engine has these units, and they are not newer than it."""
        self.check_current()
        if self.slices.keys() != set(_trained(units)):
            raise UsageError(
                "a checkpoint of one engine cannot have the average of another's weights: save and restore "
                "the average with the engine that it was made of"
            )

    def _check_weights(self, call: str) -> None:
        """Raise UsageError unless the model's weights are there."""
        integrity = self._engine._integrity
        integrity.check_own(call)
        integrity.check_complete()
        integrity.check_present()


def _trained(units: Iterable[ShardedUnit]) -> Iterator[FlatGroup]:
    return (group for unit in units for group in unit.groups if group.trainable)


def averages_in(state: Mapping[str, Any]) -> dict[str, EMA]:
    """Those of the values that a program saves or restores."""
    return {key: value for key, value in state.items() if isinstance(value, EMA)}
