"""Steps that are skipped one after another: a warning, then an error, which say whose gradients overflow.

How many were skipped in a row is a number on the device. The host reads a copy of it that was begun some
steps before, and so has arrived. Once many were skipped, the host looks at the number itself after every
step, and in the backwards that will be spoken of, each rank looks for values that are not finite in its own
gradients before they are reduced. All ranks do so in the same steps, because the number is the same on all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelz import Accelerator, Event
from zero.communication.communicator import Communicator
from zero.errors import GradientOverflowError, some
from zero.gradients.group_gradients import GroupGradients
from zero.gradients.loss_scale import LossScale
from zero.warning import warn

TOLD_AFTER = 20
"""How many steps are skipped in a row before a warning. A dynamic scale that is settling skips fewer."""
ENDS_AFTER = 100
"""How many are skipped in a row before an error: a dynamic scale has been at its least for long."""
_SUSPECT = 10
_EVERY, _LATER = 5, 3  # steps from copy to copy, and from a copy to its reading: in time for TOLD_AFTER


class SkippedSteps:
    """searching: whether to `search` this step's gradients."""

    def __init__(self, loss_scale: LossScale, accelerator: Accelerator, communicator: Communicator) -> None:
        self.searching = False
        self._loss_scale = loss_scale
        self._accelerator = accelerator
        self._communicator = communicator
        self._steps = 0
        self._suspecting = False
        self._copy = accelerator.memory.empty_host((), torch.float32)
        self._copied: Event | None = None
        self._found: str | None = None

    def search(self, gradients: GroupGradients, whole: Tensor) -> None:
        """Note the first parameter in the backward whose own gradient on this rank is not finite.

        whole: the group's gradients, flat, before they are reduced. Waits for the device.
        """
        if self._found is not None or self._finite(whole):
            return
        for name, slot in reversed(
            list(zip(gradients.group.names, gradients.group.layout.slots, strict=True))
        ):
            if slot.numel and not self._finite(whole[slot.offset : slot.offset + slot.numel]):
                self._found = name
                return

    def after_step(self) -> None:
        """Learn of the step just made. Collective once steps have been skipped for long.

        Raises GradientOverflowError after each ENDS_AFTER steps skipped in a row.
        """
        self._steps += 1
        if self._suspecting:
            self._judge(int(self._loss_scale.in_a_row))
        elif self._steps % _EVERY == 0:
            self._copy.copy_(self._loss_scale.in_a_row, non_blocking=True)
            self._copied = self._accelerator.streams.current().record()
        elif self._steps % _EVERY == _LATER and self._copied is not None:
            self._copied.synchronize()
            self._suspecting = bool(self._copy.numpy() >= _SUSPECT)

    def _judge(self, in_a_row: int) -> None:
        ends = in_a_row > 0 and in_a_row % ENDS_AFTER == 0
        if in_a_row == TOLD_AFTER or ends:
            told = self._describe(in_a_row)
            if ends:
                raise GradientOverflowError(told)
            warn(f"{told}. After {ENDS_AFTER} in a row, step() raises", rank=self._communicator.group.rank)
        self._suspecting = in_a_row >= _SUSPECT
        self.searching = in_a_row + 1 == TOLD_AFTER or (in_a_row + 1) % ENDS_AFTER == 0
        self._found = None

    def _describe(self, in_a_row: int) -> str:
        every = self._communicator.all_gather_object(self._found)
        found = [
            f"{name!r} on rank {self._communicator.name(rank)}"
            for rank, name in enumerate(every)
            if name is not None
        ]
        where = (
            f"the first in the backward that is not finite is that of {some(found)}. {_PRESENT_BEFORE}"
            if found
            else _PRESENT_IN_SUM
        )
        scale = float(self._loss_scale.scale)
        return (
            f"{in_a_row} optimizer steps in a row were skipped because gradients overflow, and nothing is "
            f"trained meanwhile; the loss scale is {scale:g}: {where}"
        )

    def _finite(self, values: Tensor) -> bool:
        return not self._accelerator.kernels.norm_and_nonfinite([values])[1].item()


_PRESENT_BEFORE = (
    "A smaller loss scale does not help where data, loss or activations are not finite themselves: look at "
    "these there, or train in bf16"
)
_PRESENT_IN_SUM = (
    "each rank's own gradients are finite, so their sum over the ranks overflows, or its norm: set "
    "zero.Config(reduce_dtype='fp32'), or train in bf16"
)
