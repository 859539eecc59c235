"""An average of the weights while they are trained, sharded as they are: `zero.EMA`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelz import HOST
from zero.errors import UsageError
from zero.sharding.flat_group import FlatGroup
from zero.tiers.values import at_least_fp32, fetch, lasting

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
    averaged. Raises UsageError for a decay outside of 0 to 1.

    decay: of the average at an update; may be changed. updates: how many there were.
    slices: by group, (shard_numel,).
    """

    def __init__(self, engine: Engine, decay: float = 0.999) -> None:
        if not 0 <= decay <= 1:
            raise UsageError(f"EMA(decay={decay!r}): expected a number from 0 to 1, such as 0.999")
        self.decay = decay
        self.updates = 0
        self._engine = engine
        self._applied = False
        engine._integrity.check_complete()
        engine._integrity.check_present()
        with lasting():
            self.slices: Mapping[FlatGroup, Tensor] = {
                group: self._begun(group) for unit in engine.units for group in unit.groups if group.trainable
            }

    def _begun(self, group: FlatGroup) -> Tensor:
        values = group.widest
        device = values.device if isinstance(values, Tensor) else HOST
        return fetch(values, device, self._engine._communicator).to(at_least_fp32(group.dtype), copy=True)

    @torch.no_grad()
    def update(self) -> None:
        """Let the average follow the weights, after an optimizer step. Not collective: slices stay apart."""
        self._check("update")
        kept: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for group, average in self.slices.items():
            averages, values = kept.setdefault(average.device, ([], []))
            averages.append(average)
            values.append(fetch(group.widest, average.device, self._engine._communicator).to(average.dtype))
        for averages, values in kept.values():
            torch._foreach_lerp_(averages, values, 1 - self.decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """In the block, the model has the averages, to be evaluated or saved, as by `save_pretrained`, and
        cannot be trained. Collective. Raises UsageError between a backward and its step."""
        self._check("applied")
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def swap(self) -> None:
        """Exchange the weights and the averages, for loops that `applied` does not fit. Collective."""
        self._engine._boundary.exchange(self.slices)
        self._applied = not self._applied

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has of it besides the slices, which every rank saves by itself."""
        return {"decay": self.decay, "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.decay, self.updates = state["decay"], state["updates"]

    def check_storable(self) -> None:
        """Raise UsageError in an `applied` block, where the weights lie in the average's place."""
        if self._applied:
            raise UsageError(
                "a checkpoint with the average cannot be saved or loaded inside ema.applied(): weights and "
                "average have changed places; end the block first"
            )

    def _check(self, call: str) -> None:
        if self._applied:
            raise UsageError(f"ema.{call}() was called inside ema.applied(): end the block first")
        self._engine._integrity.check_complete()
        self._engine._integrity.check_present()


def averages_in(state: Mapping[str, Any]) -> dict[str, EMA]:
    """Those of the values that a program saves or restores."""
    return {key: value for key, value in state.items() if isinstance(value, EMA)}
