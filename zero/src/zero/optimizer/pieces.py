"""A sub-group's pieces as tensors: views of its master, and of state that has a whole parameter's shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from accelz import rebind
from zero.optimizer.owned import OwnedPiece, OwnedSubGroup
from zero.optimizer.piece_state import moved
from zero.optimizer.routes import route
from zero.optimizer.stepping import GroupStepping
from zero.sharding.flat_group import FlatGroup
from zero.sharding.guard import NAME_ATTRIBUTE, REASON_ATTRIBUTE, guard
from zero.sharding.layout import Piece
from zero.tiers.stored import Stored


def own(
    group: FlatGroup, param_group_of: dict[nn.Parameter, int], stepping: GroupStepping
) -> tuple[OwnedSubGroup, ...]:
    """The pieces of the group that an optimizer steps, by sub-group. param_group_of: index of each
    parameter's param group.
    """
    by = stepping.stepped_by
    routes = None if by is None else route(group.layout, by, group.mesh.shards.rank)
    return tuple(_own(OwnedSubGroup(group, sub, stepping.rule, routes), param_group_of) for sub in group.subs)


def _own(owned: OwnedSubGroup, param_group_of: dict[nn.Parameter, int]) -> OwnedSubGroup:
    for piece in _pieces_of(owned):
        index = param_group_of.get(owned.group.parameters[piece.index])
        if index is not None:
            values = piece_of_master(owned, piece)
            parameter = nn.Parameter(values.data)  # has its own count of changes, whatever it is a view of
            parameter.__dict__ |= {
                NAME_ATTRIBUTE: owned.group.names[piece.index],
                REASON_ATTRIBUTE: _ELSEWHERE,
            }
            owned.pieces.append(OwnedPiece(piece, index, parameter))
            show(owned, owned.pieces[-1])
    return owned


def _pieces_of(owned: OwnedSubGroup) -> Iterable[Piece]:
    if owned.routes is not None:
        return owned.routes.pieces
    found = (whole.within(owned.sub.window) for whole in owned.group.pieces)
    return (piece for piece in found if piece is not None)


def piece_of_master(owned: OwnedSubGroup, piece: Piece) -> Tensor:
    """A view of the master; or a tensor of its shape without values, where the master is on disk, or where
    the piece is a whole parameter, which exists only during a step."""
    master = owned.sub.kept.master
    if isinstance(master, Stored) or owned.routes is not None:
        return shaped(torch.empty(owned.numel, dtype=master.dtype, device="meta"), owned.group, piece)
    return shaped(master, owned.group, piece)


def show(owned: OwnedSubGroup, piece: OwnedPiece) -> None:
    """Give the optimizer's parameter the values that there are between steps. Where there are none, using
    them raises an error that says so."""
    bind(piece, piece_of_master(owned, piece.piece))
    if piece.parameter.is_meta:
        guard([piece.parameter])


def bind(piece: OwnedPiece, values: Tensor) -> None:
    """Give the optimizer's parameter these values."""
    piece.parameter.__class__ = nn.Parameter
    rebind(piece.parameter, values)


_ELSEWHERE = (
    "which the engine keeps elsewhere between steps: it is here only during engine.step(). To change a "
    "parameter of the model, use `with zero.gathered(parameter, write_rank=...):`. An optimizer that moves "
    "weights outside its step, such as in train() and eval(), can do so with slices in memory, if it works "
    "element by element: zero.Config(whole_parameters=False), no state on disk, and engine.refresh_weights() "
    "afterwards"
)


def home_of(owned: OwnedSubGroup) -> torch.device:
    """The device of a record in memory, and of the state of its pieces."""
    return owned.sub.kept.opened().master.device


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
    """A piece's part of a parameter's state: slices of what is element-wise, in the precision of the master,
    which is what the optimizer steps; copies of the rest."""
    spec, device, master = owned.group.layout.specs[piece.index], home_of(owned), owned.sub.kept.master
    result = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == spec.shape and key != "step":
            dtype = master.dtype if value.is_floating_point() else value.dtype
            flat = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=device)
            flat.copy_(value)
            part = flat.as_strided((piece.length,), (1,), piece.start)
            result[key] = part.clone() if piece.length < spec.numel else flat
        else:
            result[key] = moved(key, value, owned.group.parameters[piece.index], device, copy=True)
    return result
