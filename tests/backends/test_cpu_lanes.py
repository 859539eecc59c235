"""Several objects that open lanes on the groups of one job: each has lanes of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from accelz.collectives import Collectives, Group
from accelz.conformance.cluster import Clusters, Context
from accelz.gloo_lanes import GlooLanes
from accelz_cpu import native
from accelz_cpu.common_memory import CommonMemory
from accelz_cpu.shared_memory import SharedMemoryCollectives


def through_memory() -> Collectives:
    library = native.library()
    assert library is not None
    return SharedMemoryCollectives(library, CommonMemory(torch.device("cpu")))


KINDS: dict[str, Callable[[], Collectives]] = {"lanes": GlooLanes, "memory": through_memory}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "memory" and native.library() is None:
        pytest.skip("the native library was not built here")
    return str(request.param)


def right(calls: Collectives, group: Group, add: float) -> bool:
    """Whether every collective gives what it should."""
    mine = torch.full((4,), group.rank + add)
    gathered, total, part = torch.zeros(4 * group.size), mine.clone(), torch.zeros(4)
    calls.all_gather(gathered, mine, group)
    calls.all_reduce(total, group)
    calls.reduce_scatter(part, gathered.clone(), group)
    expected = torch.arange(float(group.size)).repeat_interleave(4) + add
    scattered = group.size * (group.rank + add)
    return bool(
        torch.equal(gathered, expected) and (total == expected.sum() / 4).all() and (part == scattered).all()
    )


def in_turn_body(context: Context, kind: str) -> list[bool]:
    """One after another on one group, ranks having made some that they never use."""
    spare = [KINDS[kind]() for _ in range(context.rank)]
    found = [right(KINDS[kind](), context.group, float(turn)) for turn in range(3)]
    del spare
    return found


def at_once_body(context: Context, kind: str) -> list[bool]:
    """Taking turns, on two groups, and with collectives of one under way while another's begin."""
    several = [KINDS[kind]() for _ in range(3)]
    other = context.accelerator.collectives.new_group(None, 10.0)
    assert other is not None
    found = [
        right(calls, group, 10.0 * turn)
        for turn in range(2)
        for group in (context.group, other)
        for calls in several
    ]
    values = [torch.full((2,), float(number)) for number in range(len(several))]
    pairs = list(zip(several, values, strict=True))
    handles = [calls.all_reduce(value, other, async_op=True) for calls, value in pairs]
    for handle in handles:
        handle.wait()
    return [*found, *(bool((v == n * other.size).all()) for n, v in enumerate(values))]


@pytest.mark.parametrize("body", [in_turn_body, at_once_body])
def test_several_in_one_process(cluster: Clusters, kind: str, body: Callable[..., list[bool]]) -> None:
    for found in cluster(2).run(body, kind=kind, limit=30):
        assert all(found), found
