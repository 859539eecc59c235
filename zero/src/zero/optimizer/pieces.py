"""A sub-group's pieces as tensors: views of its master, and of state that has a whole parameter's shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zero.optimizer.owned import OwnedPiece, OwnedSubGroup
from zero.sharding.flat_group import FlatGroup
from zero.sharding.layout import Piece
from zero.sharding.sub_group import SubGroup
from zero.tiers.stored import Stored


def own(group: FlatGroup, param_group_of: dict[nn.Parameter, int]) -> tuple[OwnedSubGroup, ...]:
    """The group's pieces that an optimizer steps. param_group_of: index of each parameter's param group."""
    return tuple(_own(group, sub, param_group_of) for sub in group.subs)


def _own(group: FlatGroup, sub: SubGroup, param_group_of: dict[nn.Parameter, int]) -> OwnedSubGroup:
    owned = OwnedSubGroup(group, sub)
    for whole in group.pieces:
        index = param_group_of.get(group.parameters[whole.index])
        piece = whole.within(sub.window)
        if index is not None and piece is not None:
            values = piece_of_master(owned, piece)
            parameter = nn.Parameter(values.data)  # counts changes by itself, whatever it is a view of
            owned.pieces.append(OwnedPiece(piece, index, parameter))
    return owned


def piece_of_master(owned: OwnedSubGroup, piece: Piece) -> Tensor:
    """A view of the master; where that is on disk, a tensor of its shape that has no values."""
    master = owned.sub.kept.master
    if isinstance(master, Stored):
        like = torch.empty(owned.sub.numel, dtype=master.dtype, device="meta")
        return shaped(like, owned.group, piece)
    return shaped(master, owned.group, piece)


def shaped(flat: Tensor, group: FlatGroup, piece: Piece) -> Tensor:
    """A piece of a sub-group's flat values, in the parameter's shape if it is the whole parameter."""
    part = flat[piece.shard_slice]
    spec = group.layout.specs[piece.index]
    return (
        part.as_strided(spec.shape, spec.stride, part.storage_offset())
        if piece.length == spec.numel
        else part
    )


def sliced(state: dict[str, Any], owned: OwnedSubGroup, piece: Piece) -> dict[str, Any]:
    """A piece's part of a parameter's state: slices of what is element-wise, copies of the rest."""
    spec = owned.group.layout.specs[piece.index]
    result = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == spec.shape and key != "step":
            device = piece_of_master(owned, piece).device
            flat = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=device)
            flat.copy_(value)
            part = flat.as_strided((piece.length,), (1,), piece.start)
            result[key] = part.clone() if piece.length < spec.numel else flat
        else:
            result[key] = value.clone() if isinstance(value, Tensor) else value
    return result
