"""Collectives in one exchange: their bits, and when the result is there."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelz import CollectiveError, Group, ReduceOp
from accelz.conformance.cluster import Clusters, Context
from accelz.gloo import GlooLanes, HostStaged
from accelz.roles.direct_exchange import SMALL, FinishedOnWait, is_small


class Gate(dist.Work):
    """A collective that is complete when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.waiting = threading.Semaphore(0)

    def wait(self, timeout: Any = None) -> bool:
        self.waiting.release()
        return self.open.wait(10)


class SlowTarget(torch.Tensor):
    """Says how often it is copied to, and takes its time."""

    copies = 0

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        type(self).copies += 1
        threading.Event().wait(0.1)
        with torch._C.DisableTorchFunctionSubclass():
            return super().copy_(source, non_blocking)


def test_a_second_thread_returns_when_the_result_is_there_and_copies_nothing() -> None:
    gate, target = Gate(), torch.zeros(3).as_subclass(SlowTarget)
    work = FinishedOnWait(gate, lambda: target.copy_(torch.ones(3)))
    seen: list[float] = []

    def wait_and_look() -> None:
        work.wait()
        seen.append(float(target.as_subclass(torch.Tensor).sum()))

    threads = [threading.Thread(target=wait_and_look) for _ in range(2)]
    for thread in threads:
        thread.start()
    gate.waiting.acquire()
    gate.open.set()
    for thread in threads:
        thread.join()
    assert seen == [3.0, 3.0]
    assert SlowTarget.copies == 1


def drawn(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if not dtype.is_floating_point:
        return torch.randint(0, 60, (numel,), generator=generator, dtype=dtype)
    return torch.randn(numel, generator=generator, dtype=torch.float32).to(dtype)


def in_rank_order(rows: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """What a reduction has to give, bit for bit."""
    dtype = rows[0].dtype
    if op != "sum":
        return torch.stack(rows).amax(0) if op == "max" else torch.stack(rows).amin(0)
    total = rows[0].float() if dtype.itemsize == 2 else rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.to(dtype)


def reductions_body(context: Context, dtype: torch.dtype) -> list[str]:
    """Every reduction, small and large; names of those that gave other bits than sums in rank order."""
    calls, size, rank, wrong = GlooLanes(), context.group.size, context.group.rank, []
    ops: tuple[ReduceOp, ...] = ("sum", "max", "min")
    for each, op in itertools.product((1, 37, SMALL // dtype.itemsize // size + 1), ops):
        rows = [drawn(r, each * size, dtype) for r in range(size)]
        expected = in_rank_order(rows, op)
        part, whole = torch.full((each,), 1, dtype=dtype), rows[rank].clone()
        calls.reduce_scatter(part, rows[rank], context.group, op)
        if not torch.equal(part, expected.view(size, each)[rank]):
            wrong.append(f"reduce_scatter {op} {each}")
        if not torch.equal(rows[rank], drawn(rank, each * size, dtype)):
            wrong.append(f"reduce_scatter {op} {each} wrote its input")
        calls.all_reduce(whole, context.group, op)
        slack = 0.0 if is_small(whole.nbytes, size) else {4: 1e-5, 2: 0.1}.get(dtype.itemsize, 0.0)
        if not torch.allclose(whole.double(), expected.double(), rtol=0.0, atol=slack):  # large: gloo's order
            wrong.append(f"all_reduce {op} {each}")
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_reductions_give_sums_in_rank_order(cluster: Clusters, ranks: int, dtype: torch.dtype) -> None:
    assert cluster(ranks).run(reductions_body, dtype=dtype, limit=60) == [[]] * ranks


def corners_body(context: Context) -> dict[str, bool]:
    calls, group = GlooLanes(), context.group
    nan = torch.tensor([float("nan") if group.rank else 1.0, 2.0])
    calls.all_reduce(nan, group, "max")
    leaf = torch.ones(3, requires_grad=True)
    calls.all_reduce(leaf, group)
    with torch.inference_mode():
        inference = torch.ones(4)
        handle = calls.all_reduce(inference, group, async_op=True)
    handle.wait()  # outside of the mode
    grid = torch.full((2, 3), float(group.rank))
    calls.all_reduce(grid, group)
    eighth = torch.arange(4.0).to(torch.float8_e4m3fn)
    gathered = torch.empty(4 * group.size, dtype=eighth.dtype)
    calls.all_gather(gathered, eighth, group)
    nothing = torch.empty(0)
    calls.all_reduce(nothing, group)
    calls.all_gather(nothing, nothing, group)
    calls.reduce_scatter(nothing, nothing.clone(), group)
    return {
        "max keeps NaN": bool(nan[0].isnan()) and nan[1] == 2,
        "a leaf stays one": leaf.is_leaf and leaf.grad_fn is None and bool((leaf == group.size).all()),
        "inference tensors": bool((inference == group.size).all()),
        "any shape": bool((grid == sum(range(group.size))).all()),
        "any dtype": gathered.float().tolist() == [0.0, 1.0, 2.0, 3.0] * group.size,
    }


def test_corners(cluster: Clusters) -> None:
    for found in cluster(2).run(corners_body, limit=60):
        assert all(found.values()), found


class Failed(GlooLanes):
    """Has failed without any call that said so."""

    def check(self, group: Group) -> None:
        raise CollectiveError(f"a collective of {group!r} has failed")


def test_staged_collectives_tell_what_has_failed_on_the_host() -> None:
    group: Any = "this group"
    with pytest.raises(CollectiveError, match="'this group' has failed"):
        HostStaged(Failed()).check(group)
