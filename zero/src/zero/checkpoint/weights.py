"""A model's parameters and buffers as what a load fills. keys: of stored tensors, by the model's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from zero.checkpoint.engine_state import stride_of
from zero.checkpoint.names import Target
from zero.checkpoint.values import Values
from zero.communication.communicator import Communicator
from zero.sharding.cast import OWN
from zero.sharding.flat_group import FlatGroup
from zero.sharding.sharded_unit import ShardedUnit
from zero.tiers.values import changing, put


def targets(module: nn.Module) -> list[Target]:
    """All parameters and persistent buffers. Parameters may be without values: sharded, or deferred."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    parameters = [
        Target(first, tuple(p.shape), p.is_floating_point(), tuple(aliases))
        for p, (first, *aliases) in names.items()
    ]
    return parameters + [
        Target(n, tuple(b.shape), b.is_floating_point() or b.is_complex()) for n, b in buffers(module).items()
    ]


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """Tensors in the module's state dict that are no parameters."""
    return {
        name: value
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    }


def fill_units(units: Iterable[ShardedUnit], values: Values, keys: Mapping[str, str]) -> None:
    """This rank's shards and masters. Whole parameters that are kept are stale then: see spread()."""
    for unit in units:
        for group in unit.groups:
            _fill_group(group, values, keys)


@torch.no_grad()
def fill_buffers(module: nn.Module, values: Values, keys: Mapping[str, str]) -> None:
    """The module's buffers, whole."""
    for name, buffer in buffers(module).items():
        if name in keys:
            buffer.copy_(values.whole(keys[name]))


def spread(units: Iterable[ShardedUnit], communicator: Communicator) -> None:
    """Refresh whole parameters that are kept. Collective."""
    kept = [g for unit in units if unit.resident for g in unit.groups if g.shards > 1]
    for handle in list(chain.from_iterable(group.start_gather(communicator, OWN) for group in kept)):
        handle.wait()


def _fill_group(group: FlatGroup, values: Values, keys: Mapping[str, str]) -> None:
    for piece in group.pieces:
        spec = group.layout.specs[piece.index]
        if spec.name not in keys:
            continue
        with changing(group.widest[piece.shard_slice]) as target:
            values.fill(keys[spec.name], target, piece.start, stride_of(spec))
            if group.widest is not group.shard:
                put(group.shard, piece.shard_slice, target)
