"""A sub-group's pieces as tensors: views of its master, and of state that has a whole parameter's shape; and
where the blocks of DTensors are that are stepped whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accelz import Group, rebind
from zero.communication.communicator import Communicator
from zero.files.boxes import Region, row_major
from zero.optimizer.piece_state import moved
from zero.optimizer.routes import Blocks, Routes, route
from zero.optimizer.stepped import SteppedPiece, SteppedSubGroup
from zero.optimizer.stepping import GroupStepping
from zero.sharding.distributed import is_distributed, local_gradient, regions_beside
from zero.sharding.flat_group import FlatGroup
from zero.sharding.guard import NAME_ATTRIBUTE, REASON_ATTRIBUTE, ShardedParameter
from zero.sharding.layout import FlatLayout, ParameterSpec, Piece, plan
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
) -> tuple[Routes | None, Group]:
    """Where parameters are stepped whole, their routes; the ranks that these go between."""
    ranks = group.mesh.shards
    if stepping.stepped_by is None:
        return None, ranks
    blocks = Blocks.undivided(group.layout)
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
    """A view of the master; or a tensor of its shape without values, where the master is split or on disk,
    or where the piece is a whole parameter, which exists only during a step."""
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
    if piece.length < spec.numel:
        return part
    return part.as_strided(spec.shape, spec.stride, part.storage_offset())


def state_here(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """What this rank has of a parameter's state, where that is DTensors. Collective over their mesh if they
    are placed as the parameter is not."""
    return {k: local_gradient(parameter, v) if is_distributed(v) else v for k, v in state.items()}


def sliced(state: dict[str, Any], stepped: SteppedSubGroup, piece: Piece) -> dict[str, Any]:
    """A piece's part of a parameter's state: slices of what is element-wise, in the precision of the master,
    which is what the optimizer steps; copies of the rest."""
    spec, master = stepped.specs[piece.index], stepped.record.master
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


def ranks_with_blocks(
    communicator: Communicator, group: FlatGroup, across: Collection[str]
) -> frozenset[str]:
    """The dimensions of the job's mesh along which a group's slices and blocks are exchanged."""
    shards = communicator.grid.shards - group.mesh.apart if group.shards > 1 else frozenset()
    return shards | frozenset(across)


def blocks_of(communicator: Communicator, group: FlatGroup, across: Collection[str]) -> Blocks:
    """The blocks of a group that is divided along dimensions `across`. The ranks of the result are those that
    differ from this one along `ranks_with_blocks`, ascending."""
    grid, rank = communicator.grid, communicator.whole.rank
    places = [place for place, name in enumerate(grid.names) if name in across]

    def block(each: int) -> tuple[int, ...]:
        coordinates = grid.coordinates(each)
        return tuple(coordinates[place] for place in places)

    exchanged = ranks_with_blocks(communicator, group, across)
    beside = grid.part(rank, across)
    numbers = {block(each): number for number, each in enumerate(beside)}
    sources = [
        (numbers[block(each)], grid.part(each, exchanged - frozenset(across)).index(each))
        for each in grid.part(rank, exchanged)
    ]
    of_parameters = [regions_beside(parameter) for parameter in group.parameters]
    regions = [
        tuple(of_ranks[started] for of_ranks in of_parameters) for started in communicator.started(beside)
    ]
    specs = map(_spec, group.names, [tuple(parameter.shape) for parameter in group.parameters])
    layouts = tuple(_layout(group, each) for each in regions)
    return Blocks(tuple(specs), layouts, tuple(regions), tuple(sources))


def _layout(group: FlatGroup, regions: Sequence[Region]) -> FlatLayout:
    """The layout of a group on a rank that has these blocks."""
    specs = [_spec(name, region.shape) for name, region in zip(group.names, regions, strict=True)]
    return plan(specs, group.shards, group.dtype.itemsize, group.layout.block)


def _spec(name: str, shape: tuple[int, ...]) -> ParameterSpec:
    stride = row_major(shape)
    numel = shape[0] * stride[0] if shape else 1
    return ParameterSpec(name, shape, stride, numel)
