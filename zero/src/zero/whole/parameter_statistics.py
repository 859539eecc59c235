"""Norms and histograms of parameters and gradients, of all parameters with one collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero.gradients.reducer import GradientReducer
from zero.sharding.flat_group import FlatGroup
from zero.sharding.stand_in import Multiplier
from zero.tiers.values import Values, in_memory

FactorsOf = Callable[[nn.Parameter], Sequence[Multiplier]]
LOWEST, HIGHEST = -40, 24
"""Powers of two: the lower edges of the second and of the last but one bucket."""
BUCKETS = HIGHEST - LOWEST + 3
EDGES = (0.0, *(2.0**power for power in range(LOWEST, HIGHEST + 2)), math.inf)
"""Where buckets begin and end; bucket i has magnitudes from EDGES[i] up to, and without, EDGES[i + 1]. The
last has infinite ones, too."""

CHUNK = 1 << 22
"""Elements looked at at once, with temporaries of 30 bytes for each."""


@dataclass(frozen=True)
class ParameterStatistics:
    """Of one parameter; all on the device, fp32. gradient_...: averaged and unscaled, before `clip_norm`;
    None for a parameter that no rank has used.

    norm: L2, 0-dim. histogram: how many values have a magnitude in each bucket, (len(EDGES) - 1,); NaN ones
    are in none.
    """

    norm: Tensor
    histogram: Tensor
    gradient_norm: Tensor | None = None
    gradient_histogram: Tensor | None = None


@torch.no_grad()
def measure(reducer: GradientReducer, factors_of: FactorsOf) -> dict[str, ParameterStatistics]:
    """The statistics of all trained parameters, by name. Collective, once.

    factors_of: what the sum of a parameter's gradients is multiplied by.
    """
    communicator, device = reducer.communicator, reducer.stores.accelerator.device
    names = [name for gradients in reducer.all for name in gradients.group.names]
    both = torch.zeros(2, len(names), 1 + BUCKETS, dtype=torch.float32, device=device)
    reduces = any(have.times < communicator.alike.size for have in reducer.all)
    first = 0
    with communicator.postponing_disk_errors():
        for have in reducer.all:
            window = slice(first, first := first + len(have.group.names))
            share = 1 / have.times if reduces else 1.0  # of what several ranks count alike
            _add(both[0, window], share, have.group, have.group.widest, lambda _: ())
            if have.slice.present:
                _add(both[1, window], share, have.group, reducer.summed(have), factors_of)
    if reduces:
        communicator.all_reduce("parameter statistics", both, communicator.alike, "sum").wait()
    both[..., 0].sqrt_()
    used = {name for have in reducer.all for i, name in enumerate(have.group.names) if i in have.used}
    found = {}
    for name, mine, gradient in zip(names, both[0], both[1], strict=True):
        beside = (gradient[0], gradient[1:]) if name in used else ()
        found[name] = ParameterStatistics(mine[0], mine[1:], *beside)
    return found


def _add(rows: Tensor, share: float, group: FlatGroup, values: Values, factors_of: FactorsOf) -> None:
    """Add a share of this rank's part of a group's values, times their factors, to the rows of its
    parameters."""
    here = in_memory(values)
    for piece in group.pieces:
        factors = factors_of(group.parameters[piece.index])
        rows[piece.index] += _row(here[piece.shard_slice], factors).to(rows.device) * share


def _row(part: Tensor, factors: Sequence[Multiplier] = ()) -> Tensor:
    """The sum of squares, and the counts of the buckets, of values times `factors`, (1 + BUCKETS,)."""
    edges = torch.tensor(EDGES[1:-1], dtype=torch.float32, device=part.device)
    square = torch.zeros(1, dtype=torch.float32, device=part.device)
    # In fp32, adding ones would stop at 2**24. Unlike bincount, this waits for no device.
    counts = torch.zeros(BUCKETS, dtype=torch.int64, device=part.device)
    for chunk in part.split(CHUNK):
        values = chunk.float()
        for factor in factors:
            values = values * (factor.to(part.device) if isinstance(factor, Tensor) else factor)
        square += values.square().sum()
        counts.scatter_add_(0, torch.bucketize(values.abs(), edges, right=True), (~values.isnan()).long())
    return torch.cat((square, counts.float()))
