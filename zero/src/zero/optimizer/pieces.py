"""A sub-group's pieces as tensors: views of its master, and of state that has a whole parameter's shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accelz import Group, rebind
from zero.communication.communicator import Communicator
from zero.optimizer.blocks import blocks_of, ranks_with_blocks
from zero.optimizer.piece_state import moved
from zero.optimizer.routes import Blocks, Routes, route
from zero.optimizer.stepped import SteppedPiece, SteppedSubGroup
from zero.optimizer.stepping import GroupStepping
from zero.sharding.flat_group import FlatGroup
from zero.sharding.guard import NAME_ATTRIBUTE, REASON_ATTRIBUTE, ShardedParameter
from zero.sharding.layout import ParameterSpec, Piece
from zero.tiers.values import Stored


def stepped_sub_groups(
    group: FlatGroup,
    param_group_of: dict[nn.Parameter, int],
    stepping: GroupStepping,
    communicator: Communicator,
) -> tuple[SteppedSubGroup, ...]:
    """The pieces of the group that an optimizer steps, by sub-group. param_group_of: index of each
    parameter's param group.
    """
    routes, ranks = _routes(group, stepping, communicator)
    found = (SteppedSubGroup(group, sub, stepping.rule, routes, ranks) for sub in group.subs)
    return tuple(_with_pieces(stepped, param_group_of) for stepped in found)


def _routes(
    group: FlatGroup, stepping: GroupStepping, communicator: Communicator
) -> tuple[Routes | None, Group | None]:
    """Where parameters are stepped whole, their routes and the ranks that these go between."""
    if stepping.stepped_by is None:
        return None, None
    blocks, ranks = Blocks.undivided(group.layout), group.mesh.shards
    if stepping.across:
        blocks = blocks_of(communicator, group, stepping.across)
        ranks = communicator.part(ranks_with_blocks(communicator, group, stepping.across))
    return route(blocks, stepping.stepped_by, ranks.rank), ranks


def _with_pieces(stepped: SteppedSubGroup, param_group_of: dict[nn.Parameter, int]) -> SteppedSubGroup:
    for piece in _pieces_of(stepped):
        index = param_group_of.get(stepped.group.parameters[piece.index])
        if index is not None:
            values = piece_of_master(stepped, piece)
            parameter = nn.Parameter(values.data)  # has its own count of changes, whatever it is a view of
            parameter.__dict__ |= {
                NAME_ATTRIBUTE: stepped.group.names[piece.index],
                REASON_ATTRIBUTE: _ELSEWHERE,
            }
            stepped.pieces.append(SteppedPiece(piece, index, parameter))
            show(stepped, stepped.pieces[-1])
    return stepped


def _pieces_of(stepped: SteppedSubGroup) -> Iterable[Piece]:
    if stepped.routes is not None:
        return stepped.routes.pieces
    found = (whole.within(stepped.sub.window) for whole in stepped.group.pieces)
    return (piece for piece in found if piece is not None)


def piece_of_master(stepped: SteppedSubGroup, piece: Piece) -> Tensor:
    """A view of the master; or a tensor of its shape without values, where the master is on disk, or where
    the piece is a whole parameter, which exists only during a step."""
    master = stepped.record.master
    if isinstance(master, Stored) or stepped.routes is not None:
        return shaped(torch.empty(stepped.numel, dtype=master.dtype, device="meta"), stepped.specs, piece)
    return shaped(master, stepped.specs, piece)


def show(stepped: SteppedSubGroup, piece: SteppedPiece) -> None:
    """Give the optimizer's parameter the values that there are between steps. Where there are none, using
    them raises an error that says so."""
    bind(piece, piece_of_master(stepped, piece.piece))
    if piece.parameter.is_meta:
        piece.parameter.__class__ = ShardedParameter


def bind(piece: SteppedPiece, values: Tensor) -> None:
    """Give the optimizer's parameter these values."""
    piece.parameter.__class__ = nn.Parameter
    rebind(piece.parameter, values)


_ELSEWHERE = (
    "which the engine keeps elsewhere between steps: it is here only during a step. To change a "
    "parameter of the model, use `with zero.gathered(parameter, write_rank=...):`. An optimizer that moves "
    "weights outside its step, such as in train() and eval(), can do so with slices in memory, if it works "
    "element by element: zero.Config(whole_parameters=False), no state on disk, and engine.refresh_weights() "
    "afterwards"
)


def shaped(flat: Tensor, specs: Sequence[ParameterSpec], piece: Piece) -> Tensor:
    """A piece of a sub-group's flat values, in the parameter's shape if it is the whole parameter."""
    part = flat[piece.shard_slice]
    spec = specs[piece.index]
    return (
        part.as_strided(spec.shape, spec.stride, part.storage_offset())
        if piece.length == spec.numel
        else part
    )


def sliced(state: dict[str, Any], stepped: SteppedSubGroup, piece: Piece) -> dict[str, Any]:
    """A piece's part of a parameter's state: slices of what is element-wise, in the precision of the master,
    which is what the optimizer steps; copies of the rest."""
    spec, master = stepped.specs[piece.index], stepped.master
    result = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == spec.shape and key != "step":
            dtype = master.dtype if value.is_floating_point() else value.dtype
            flat = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=master.device)
            flat.copy_(value)
            part = flat.as_strided((piece.length,), (1,), piece.start)
            result[key] = part.clone() if piece.length < spec.numel else flat
        else:
            result[key] = moved(key, value, stepped.group.parameters[piece.index], master.device, copy=True)
    return result
