"""One sub-group's part of an optimizer step: kernel calls, which are first planned and then made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelz import Kernels
from zero.optimizer.kernel_rules import Rule, take_step
from zero.optimizer.stepped import SteppedSubGroup
from zero.tiers.record import Opened

SCRATCH = 8  # fp32 values that a kernel may need beside each element it works on


def scratch_bytes(numel: int, chunk: int) -> int:
    """The most bytes that stepping a shard may take besides the shard. chunk: see `Kernels`."""
    return SCRATCH * 4 * min(numel, chunk)


@dataclass(frozen=True)
class Factors:
    """What a step needs to know of all gradients, on one device. scale: 0-dim factor. skip: 0-dim; with 1.0
    the step changes nothing."""

    scale: Tensor | None
    skip: Tensor | None

    def to(self, device: torch.device) -> Factors:
        """The same on another device; moving them off the accelerator waits for it."""
        return Factors(*(None if f is None else f.to(device) for f in (self.scale, self.skip)))


@dataclass(frozen=True)
class Call:
    """One kernel call. first: its first piece, whose step count is that of all its pieces. window: its part
    of the sub-group."""

    first: int
    window: slice
    options: dict[str, Any]


@dataclass(frozen=True)
class GroupStep:
    """A planned step. Equal steps turn the same values into the same results. missed: pieces without a
    gradient."""

    rule: Rule
    calls: tuple[Call, ...]
    missed: tuple[int, ...]

    @property
    def written(self) -> list[slice]:
        """The elements that the calls step, in ascending order."""
        return [call.window for call in self.calls]

    def run(
        self,
        kernels: Kernels,
        state: Opened,
        steps: Tensor,
        gradient: Tensor,
        factors: Factors,
        narrow: Tensor | None,
    ) -> None:
        """Step `state`, and count that in `steps`, (pieces,). gradient: (numel,). narrow: 16-bit, of the same
        shape; receives the weights. All are on one device."""
        if self.rule.counts:
            self._count(steps, factors.skip)
        for call in self.calls:
            window = call.window
            named = zip(self.rule.moments, state.moments, strict=True)
            moments: dict[str, Any] = {name: moment[window] for name, moment in named}
            update = self.rule.update(
                master=state.master[window],
                grad=gradient[window],
                grad_scale=factors.scale,
                skip=factors.skip,
                weights=None if narrow is None else narrow[window],
                step=steps[call.first] if self.rule.counts else None,
                **moments,
                **call.options,
            )
            take_step(kernels, update)

    def _count(self, steps: Tensor, skip: Tensor | None) -> None:
        increment = 1 if skip is None else 1 - skip
        steps.add_(increment)
        for piece in self.missed:  # a mask from the host would wait for the device
            steps[piece].sub_(increment)


def plan_step(
    rule: Rule, param_groups: Sequence[dict[str, Any]], stepped: SteppedSubGroup, used: set[int]
) -> GroupStep:
    """The step of a sub-group in which the parameters `used` have gradients, with the present
    hyper-parameters."""
    missed = stepped.missing(used)
    calls = []
    for first, window in stepped.runs(missed):
        options = rule.options(param_groups[stepped.pieces[first].param_group])
        calls.append(Call(first, window, options))
    return GroupStep(rule, tuple(calls), missed)
