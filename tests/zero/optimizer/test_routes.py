"""Which rank steps a parameter whole, and the way there and back."""

from __future__ import annotations

import random

from zero.optimizer.routes import Routes, route, share_out
from zero.sharding import layout
from zero.sharding.layout import ParameterSpec


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
        routes = [route(plan, owners, rank) for rank in range(ranks)]
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


def _cut(values: list[int], routes: Routes) -> list[list[int]]:
    """What a rank sends to each rank."""
    flat = [value for window in routes.windows for value in values[window]]
    parts = []
    for count in routes.given:
        parts.append(flat[:count])
        flat = flat[count:]
    return parts
