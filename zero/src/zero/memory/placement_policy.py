"""Where optimizer state is from step to step, and what happens when a forward or backward finds no room.

Static: it stays where the settings put it. For `offload="auto"`, see `balance`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero.tiers.room import OutOfMemoryError
from zero.tiers.stores import Stores


@dataclass(eq=False, repr=False)
class StaticPlacementPolicy:
    """predicted_peak: bytes of the device that steps need, by calculation; 0 for not known."""

    predicted_peak = 0

    stores: Stores

    def __post_init__(self) -> None:
        self._accelerator = self.stores.accelerator

    def forward(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], recover: Callable[[], None]
    ) -> Any:
        """Call the module. recover(): drops gradients, gathers and calls under way; called before an error
        that asks for all micro-batches to be repeated."""
        return module(*args, **kwargs)

    def repeating(self) -> AbstractContextManager[None]:
        """Around autograd's run."""
        return nullcontext()

    def after_failure(self) -> None:
        """A backward that autograd began by itself has failed, as is noticed when something else begins."""

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
        if not self.stores.relieve(self._accelerator.memory.stats().capacity):
            raise error


def asking_to_repeat(what: str) -> OutOfMemoryError:
    """Make the error for a forward or backward that cannot be repeated here, as other ranks would not."""
    return OutOfMemoryError(
        f"out of memory: no room for what the {what} computes. All optimizer state of this rank has now "
        "moved to the host: if every rank reports this, repeat the micro-batches of this optimizer step on "
        "all of them; if other ranks went on, they will time out waiting for this one: start a new job from "
        "a checkpoint"
    )
