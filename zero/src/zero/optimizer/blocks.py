"""Where the blocks of DTensors are that are stepped whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zero.communication.communicator import Communicator
from zero.files.boxes import Region, row_major
from zero.optimizer.routes import Blocks
from zero.sharding import layout
from zero.sharding.distributed import regions_beside
from zero.sharding.flat_group import FlatGroup
from zero.sharding.layout import FlatLayout, ParameterSpec


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
    return Blocks(
        specs=tuple(
            _spec(name, tuple(p.shape)) for name, p in zip(group.names, group.parameters, strict=True)
        ),
        layouts=tuple(_layout(group, each) for each in regions),
        regions=tuple(regions),
        sources=tuple(sources),
    )


def _layout(group: FlatGroup, regions: Sequence[Region]) -> FlatLayout:
    """The layout of a group on a rank that has these blocks."""
    specs = [_spec(name, region.shape) for name, region in zip(group.names, regions, strict=True)]
    return layout.plan(specs, group.shards, group.dtype.itemsize, group.layout.block)


def _spec(name: str, shape: tuple[int, ...]) -> ParameterSpec:
    stride = row_major(shape)
    numel = shape[0] * stride[0] if shape else 1
    return ParameterSpec(name, shape, stride, numel)
