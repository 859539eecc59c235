"""Batches divided over ranks, and means over all of them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import zero
from accelz.conformance.cluster import Clusters, Context
from zero.parallel import tokens

LENGTH = 6


def body(context: Context) -> None:
    group = torch.distributed.group.WORLD
    assert group is not None
    batch = {
        "input_ids": torch.arange(2 * LENGTH).view(2, LENGTH),
        "attention_mask": torch.ones(2, LENGTH),
        "labels": torch.arange(2 * LENGTH).view(2, LENGTH),
    }
    inputs, labels = tokens.split_batch(batch, group)
    first = 3 * context.rank
    assert inputs["input_ids"].tolist() == [[first + i for i in range(n, n + 3)] for n in (0, LENGTH)]
    assert inputs["position_ids"].tolist() == [[first, first + 1, first + 2]] * 2
    assert inputs["attention_mask"].shape == (2, LENGTH)
    after = [[1, 2, 3], [7, 8, 9]] if context.rank == 0 else [[4, 5, -100], [10, 11, -100]]
    assert labels is not None
    assert labels.tolist() == after

    logits = torch.randn(2, LENGTH, 2 * LENGTH, generator=torch.Generator().manual_seed(2))
    whole, mine = (each.requires_grad_() for each in (logits.clone(), tokens.split(logits, group).clone()))
    expected = F.cross_entropy(whole[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    found = tokens.cross_entropy(mine, labels, group)
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    assert whole.grad is not None
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad / 2, tokens.split(whole.grad, group))  # of two ranks that average

    assert math.isnan(tokens.cross_entropy(mine, torch.full_like(labels, -100), group).item())
    with pytest.raises(zero.UsageError, match="5 tokens cannot be divided evenly over 2 ranks: pad"):
        tokens.split(torch.ones(1, 5), group)
    with pytest.raises(zero.UsageError, match="give each sequence a row of its own"):
        tokens.split_batch({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, group)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])  # padded on the left, and on the right
    places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    inputs, _ = tokens.split_batch({"position_ids": places, "attention_mask": mask}, group)
    assert torch.equal(inputs["position_ids"], tokens.split(places, group))
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    for mask in (torch.ones(1, 6), torch.tensor([[1, 1, 0, 1, 1, 1]])):
        with pytest.raises(zero.UsageError, match="begin anew within a row"):
            tokens.split_batch({"position_ids": packed, "attention_mask": mask}, group)


def test_batches_and_losses_of_two_ranks_are_those_of_one(cluster: Clusters) -> None:
    cluster(2).run(body)
