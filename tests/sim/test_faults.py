"""Faults that are switched on occur where they should, once, and leave everything usable."""

from __future__ import annotations

import time

import pytest
import torch

from accelz import Accelerator, CollectiveError
from accelz.conformance.cluster import Clusters, Context

from .on_sim import on_sim


@on_sim
def test_the_nth_allocation_is_out_of_memory(accelerator: Accelerator) -> None:
    from accelz_sim import faults

    before = accelerator.memory.stats().allocated
    made = []
    with faults.out_of_memory(3):
        made += [torch.empty(4, device=accelerator.device) for _ in range(2)]
        torch.empty(0, device=accelerator.device)
        with pytest.raises(torch.OutOfMemoryError, match="an injected fault"):
            made.append(torch.empty(4, device=accelerator.device))
        made.append(torch.empty(4, device=accelerator.device))
    assert accelerator.memory.stats().allocated == before + 3 * 16
    with faults.out_of_memory(1):
        pass
    made.append(torch.empty(4, device=accelerator.device))
    with pytest.raises(ValueError, match="the next one is 1"), faults.out_of_memory(0):
        pass


@on_sim
def test_out_of_memory_in_a_resize_leaves_the_storage(accelerator: Accelerator) -> None:
    from accelz_sim import faults

    data = torch.arange(4.0, device=accelerator.device)
    with faults.out_of_memory(1), pytest.raises(torch.OutOfMemoryError):
        data.untyped_storage().resize_(64)
    assert data.untyped_storage().nbytes() == 16
    assert torch.equal(data.cpu(), torch.arange(4.0))


def _meet(context: Context, kind: str, nth: int) -> tuple[int, float, str]:
    """Gather until it fails on rank 0: how many succeeded, the seconds of the last, and its error."""
    from accelz_sim import faults

    calls, device = context.accelerator.collectives, context.accelerator.device
    shard, output = torch.ones(3, device=device), torch.zeros(3 * context.size, device=device)
    calls.barrier(context.group)
    fault = faults.collective(kind, nth) if context.rank == 0 else faults.prompt_streams()
    with fault:
        for done in range(nth + 1):
            started = time.monotonic()
            try:
                calls.all_gather(output, shard, context.group, async_op=True).wait()
            except CollectiveError as error:
                return done, time.monotonic() - started, str(error)
    return nth + 1, 0.0, ""


@pytest.mark.parametrize("kind", ["fails", "stalls"])
def test_the_nth_collective(sim: Clusters, kind: str) -> None:
    job = Clusters("sim", timeout=2.0)
    try:
        (done, seconds, error), (others_done, others_seconds, others_error) = job(2).run(
            _meet, kind=kind, nth=3
        )
    finally:
        job.stop()
    assert (done, others_done) == (2, 2)
    assert "all_gather failed: an injected fault" in error
    assert others_error
    assert others_seconds > 1.5, "the other rank runs into its timeout"
    assert (seconds > 1.5) is (kind == "stalls")
