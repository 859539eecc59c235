"""Filling a model's parameters and buffers. keys: the keys of stored tensors, by the model's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from zero.files.boxes import Region
from zero.files.dtypes import name_of
from zero.files.manifest import is_row_major
from zero.files.names import Target
from zero.loading.tensor_reader import TensorReader
from zero.sharding.distributed import region_of
from zero.sharding.flat_group import FlatGroup
from zero.sharding.forms import packed_leaves
from zero.sharding.layout import ParameterSpec
from zero.sharding.sharded_unit import ShardedUnit
from zero.sharding.state_entries import entries_of
from zero.tiers.values import changing, put


def stride_of(spec: ParameterSpec) -> tuple[int, ...] | None:
    """A parameter's strides, or None if its memory order is row-major."""
    return None if not spec.numel or is_row_major(spec.shape, spec.stride) else spec.stride


def targets(module: nn.Module) -> list[Target]:
    """All parameters and persistent buffers. Parameters need not have values (sharded or deferred ones)."""
    entries, packed = entries_of(module), packed_leaves(module)
    parameters = []
    for p, (first, *aliases) in entries.parameters.items():
        dtype = name_of(p.dtype, first) if p in packed else None
        parameters.append(Target(first, tuple(p.shape), p.is_floating_point(), tuple(aliases), dtype))
    return parameters + [
        Target(n, tuple(b.shape), b.is_floating_point() or b.is_complex()) for n, b in entries.buffers.items()
    ]


def fill_units(units: Iterable[ShardedUnit], reader: TensorReader, keys: Mapping[str, str]) -> None:
    """Fill this rank's shards and masters. This makes resident units' whole buffers stale: see `refill`."""
    for unit in units:
        for group in unit.groups:
            _fill_group(group, reader, keys)


@torch.no_grad()
def fill_buffers(module: nn.Module, reader: TensorReader, keys: Mapping[str, str]) -> None:
    """Fill the module's buffers, whole."""
    for name, buffer in entries_of(module).buffers.items():
        if name in keys:
            buffer.copy_(reader.whole(keys[name]))


def stored_region(group: FlatGroup, index: int, reader: TensorReader, key: str) -> Region | None:
    """What of a stored tensor is this rank's block of a parameter; None for all of it."""
    parameter = group.parameters[index]
    return region_of(parameter) if reader.shape(key) == tuple(parameter.shape) else None


def fill_slices(slices: Mapping[FlatGroup, Tensor], reader: TensorReader, keys: Mapping[str, str]) -> None:
    """Fill this rank's slices of further values of the parameters, (shard_numel,) by group."""
    for group, flat in slices.items():
        for piece in group.pieces:
            spec = group.layout.specs[piece.index]
            if spec.name in keys:
                region = stored_region(group, piece.index, reader, keys[spec.name])
                reader.fill(keys[spec.name], flat[piece.shard_slice], piece.start, stride_of(spec), region)


def _fill_group(group: FlatGroup, reader: TensorReader, keys: Mapping[str, str]) -> None:
    for piece in group.pieces:
        spec = group.layout.specs[piece.index]
        if spec.name not in keys:
            continue
        region = stored_region(group, piece.index, reader, keys[spec.name])
        with changing(group.widest[piece.shard_slice]) as target:
            reader.fill(keys[spec.name], target, piece.start, stride_of(spec), region)
            if group.widest is not group.shard:
                put(group.shard, piece.shard_slice, target)
