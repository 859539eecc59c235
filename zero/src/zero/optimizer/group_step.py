"""One sub-group's part of an optimizer step, by kernel calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelz import Kernels
from zero.optimizer.kernel_rules import take_step
from zero.optimizer.stepped import SteppedSubGroup
from zero.tiers.tier import Opened

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


def step_sub_group(
    stepped: SteppedSubGroup,
    used: set[int],
    param_groups: Sequence[dict[str, Any]],
    kernels: Kernels,
    state: Opened,
    gradient: Tensor,
    factors: Factors,
    narrow: Tensor | None,
    rates: Tensor | None = None,
) -> list[slice]:
    """Step a sub-group's `state` where the parameters `used` have gradients, by one kernel call for each
    stretch that has the same hyper-parameters and step count; return these stretches, in ascending order.

    gradient: (numel,). narrow: 16-bit, of the same shape; receives the weights, and has those of a split
    master before. rates: (param_groups, 2), where the step is captured; see `accelz.updates.Update`. All are
    on one device.
    """
    rule, steps, missed = stepped.rule, stepped.steps, stepped.missing(used)
    assert rule is not None
    calls = [
        (first, window, (index := stepped.pieces[first].param_group), rule.options(param_groups[index]))
        for first, window in stepped.runs(missed)
    ]
    if rule.counts:
        _count(steps, missed, factors.skip)
        stepped.remember(missed)
    for first, window, index, options in calls:
        columns = zip(stepped.group.placement.moments, state.moments, strict=True)
        parts = [values[column.window(window)] for column, values in columns]
        moments = dict(zip(rule.moments, parts, strict=False))
        update = rule.update(
            master=state.master[window],
            grad=gradient[window],
            grad_scale=factors.scale,
            skip=factors.skip,
            weights=None if narrow is None else narrow[window],
            step=steps[first] if rule.counts else None,
            scales=tuple(parts[len(moments) :]),
            rates=None if rates is None else rates[index],
            **{**moments, **options},
        )
        take_step(kernels, update)
    return [window for _, window, _, _ in calls]


def _count(steps: Tensor, missed: Sequence[int], skip: Tensor | None) -> None:
    """Count a step in `steps`, (pieces,), but for the pieces that had no gradient."""
    increment = 1 if skip is None else 1 - skip
    steps.add_(increment)
    for piece in missed:  # a mask from the host would wait for the device
        steps[piece].sub_(increment)
