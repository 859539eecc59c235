"""Which rank steps a parameter whole, and the way there and back."""

from __future__ import annotations

import math
import random
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero.files.boxes import Region, Run, row_major
from zero.optimizer.parameter_exchange import divide, join
from zero.optimizer.routes import Blocks, Routes, route, share_out
from zero.sharding import layout
from zero.sharding.layout import ParameterSpec

T = TypeVar("T")


def test_parameters_are_shared_out_evenly() -> None:
    generator = random.Random(0)
    for _ in range(200):
        ranks, count = generator.randint(1, 9), generator.randint(0, 40)
        sizes = [generator.randint(0, 1000) for _ in range(count)]
        loads = [0] * ranks
        for index, rank in share_out((n, size, ranks) for n, size in enumerate(sizes)).items():
            loads[rank] += sizes[index]
        best = max(-(-sum(sizes) // ranks), max(sizes, default=0))
        pairs = sorted(sizes, reverse=True)[ranks - 1 : ranks + 1]  # two of these must share a rank
        best = max(best, sum(pairs) if len(pairs) == 2 else 0)
        assert max(loads) <= 4 / 3 * best


def test_routes_lead_to_whole_parameters_and_back() -> None:
    generator = random.Random(0)
    for _ in range(100):
        ranks = generator.randint(1, 5)
        sizes = [generator.choice((0, 1, 7, 64, 200)) for _ in range(generator.randint(1, 9))]
        specs = [ParameterSpec(str(i), (n,), (1,), n) for i, n in enumerate(sizes)]
        plan = layout.plan(specs, ranks, 4)
        owners = [generator.choice((None, *range(ranks))) for _ in sizes]
        buffer = list(range(plan.numel))
        routes = [route(Blocks.undivided(plan), owners, rank) for rank in range(ranks)]
        sent = [_cut(buffer[plan.shard_slice(r)], routes[r]) for r in range(ranks)]
        for rank, mine in enumerate(routes):
            assert mine.total == routes[0].total
            received = [value for parts in sent for value in parts[rank]]
            assert len(received) == mine.numel
            for piece in mine.pieces:
                offset = plan.slots[piece.index].offset
                assert received[piece.shard_slice] == buffer[offset : offset + piece.length]
                assert owners[piece.index] == rank
            assert tuple(map(len, sent[rank])) == mine.given
            assert tuple(len(parts[rank]) for parts in sent) == mine.taken
        assert sum(mine.numel for mine in routes) == routes[0].total
        assert {p.index for r in routes for p in r.pieces} == {
            i for i, owner in enumerate(owners) if owner is not None and sizes[i]
        }


def test_routes_lead_from_blocks_to_whole_parameters_and_back() -> None:
    """Two blocks, of which one may be empty, of rows or of columns, which are not all neighbours; in two or
    three slices each."""
    generator = random.Random(0)
    for _ in range(50):
        shards = generator.choice((2, 3))
        shapes = [(generator.randint(1, 9), generator.randint(1, 40)) for _ in range(generator.randint(1, 5))]
        regions = list(zip(*(_halves(shape, generator) for shape in shapes), strict=True))
        blocks = Blocks(
            specs=tuple(_spec(n, shape) for n, shape in enumerate(shapes)),
            layouts=tuple(
                layout.plan([_spec(n, r.shape) for n, r in enumerate(each)], shards, 4) for each in regions
            ),
            regions=tuple(regions),
            sources=tuple((block, shard) for shard in range(shards) for block in range(2)),
        )
        wholes = [torch.randn(shape) for shape in shapes]
        buffers = [_laid_out(plan, wholes, each) for plan, each in zip(blocks.layouts, regions, strict=True)]
        slices = [buffers[b][blocks.layouts[b].shard_slice(shard)].tolist() for b, shard in blocks.sources]
        owners = [generator.randrange(2 * shards) for _ in shapes]
        routes = [route(blocks, owners, rank) for rank in range(2 * shards)]
        sent = [_cut(part, each) for part, each in zip(slices, routes, strict=True)]
        for rank, mine in enumerate(routes):
            assert tuple(len(parts[rank]) for parts in sent) == mine.taken
            came = torch.tensor([value for parts in sent for value in parts[rank]])
            found, back = torch.empty(mine.numel), torch.empty(mine.numel)
            join(came, mine, found)
            for piece in mine.pieces:
                assert owners[piece.index] == rank
                assert torch.equal(found[piece.shard_slice], wholes[piece.index].flatten())
            scratch = torch.empty(mine.scattered)
            with NothingAllocated():
                divide(found, mine, back, scratch)
            assert torch.equal(back, came)
        assert sum(mine.numel for mine in routes) == routes[0].total == sum(map(math.prod, shapes))


class NothingAllocated(TorchDispatchMode):
    """Operations give views, or change their arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(each.alias_info is None for each in func._schema.returns), func
        return func(*args, **(kwargs or {}))


def _spec(number: int, shape: tuple[int, ...]) -> ParameterSpec:
    return ParameterSpec(str(number), shape, row_major(shape), math.prod(shape))


def _halves(shape: tuple[int, int], generator: random.Random) -> tuple[Region, Region]:
    """Two regions that are a whole together."""
    dim, size = generator.choice(((0, shape[0]), (1, shape[1])))
    cut = generator.randint(0, size)
    parts = [[Run(0, cut)], [Run(cut, size - cut)]]
    if 0 < cut < size - 1 and generator.random() < 0.5:
        parts = [[Run(0, cut), Run(size - 1, 1)], [Run(cut, size - cut - 1)]]
    runs = [tuple(run for run in part if run.length) for part in parts]
    other = (Run(0, shape[1 - dim]),)
    first, second = (Region((run, other) if dim == 0 else (other, run)) for run in runs)
    return first, second


def _laid_out(plan: layout.FlatLayout, wholes: list[Tensor], regions: tuple[Region, ...]) -> Tensor:
    """A buffer with one block of each parameter."""
    buffer = torch.full((plan.numel,), torch.nan)
    for slot, whole, region in zip(plan.slots, wholes, regions, strict=True):
        indices = [
            torch.tensor([i for r in runs for i in range(r.first, r.first + r.length)])
            for runs in region.runs
        ]
        values = whole[indices[0].long()][:, indices[1].long()]
        buffer[slot.offset : slot.offset + slot.numel] = values.flatten()
    return buffer


def _cut(values: list[T], routes: Routes) -> list[list[T]]:
    """What a rank sends to each rank."""
    flat = [value for window in routes.windows for value in values[window]]
    parts = []
    for count in routes.given:
        parts.append(flat[:count])
        flat = flat[count:]
    return parts
