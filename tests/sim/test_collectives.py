"""Collectives staged through the host: ranks that disagree, devices that are not the first, late results."""

from __future__ import annotations

import pytest
import torch

from accelz import CollectiveError
from accelz.conformance.cluster import Clusters, Context


def _disagree(context: Context) -> str:
    calls, device, group = context.accelerator.collectives, context.accelerator.device, context.group
    n = 8 if context.rank else 200
    output, shard = torch.zeros(n * context.size, device=device), torch.ones(n, device=device)
    with pytest.raises(CollectiveError) as raised:
        calls.all_gather(output, shard, group)
    return str(raised.value)


def test_ranks_that_disagree_are_told_so(sim: Clusters) -> None:
    ranks = sim(2)
    for told in ranks.run(_disagree):
        assert "all_gather of 1600 bytes (float32) on rank 0" in told
        assert "all_gather of 64 bytes (float32) on rank 1" in told
    ranks.stop()  # their group can do nothing more


def _on_own_device(context: Context) -> tuple[str, float]:
    calls, device, group = context.accelerator.collectives, context.accelerator.device, context.group
    total = torch.full((3,), float(context.rank), device=device)
    calls.all_reduce(total, group)
    return str(device), total.sum().item()


def test_ranks_take_turns_on_the_devices(sim: Clusters) -> None:
    assert sim(3).run(_on_own_device) == [("sim:0", 9.0), ("sim:1", 9.0), ("sim:0", 9.0)]


def _on_a_side_stream(context: Context) -> tuple[bool, float]:
    calls, streams, group = context.accelerator.collectives, context.accelerator.streams, context.group
    shard = torch.ones(4, device=context.accelerator.device)
    output = torch.zeros(4 * context.size, device=context.accelerator.device)
    with streams.use(streams.new()):
        handle = calls.all_gather(output, shard * 3, group, async_op=True)
    before = output.sum().item()
    handle.wait()
    return before == 0, output.sum().item()


def test_the_result_is_there_after_wait_and_not_before(sim: Clusters) -> None:
    assert sim(2).run(_on_a_side_stream) == [(True, 24.0)] * 2
