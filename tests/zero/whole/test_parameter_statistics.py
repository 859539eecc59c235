"""Norms and histograms of all parameters and gradients in one call."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import adamw
from zero.whole.parameter_statistics import EDGES, _row


def counted(values: Tensor) -> list[float]:
    magnitudes = values.float().abs().flatten().tolist()
    return [sum(low <= each < high for each in magnitudes) for low, high in itertools.pairwise(EDGES)]


def near(found: Tensor | None, wanted: Tensor) -> bool:
    return found is not None and torch.allclose(found.cpu(), wanted.float().norm().cpu(), rtol=1e-5)


def statistics_body(context: Context) -> None:
    for settings in ({"stage": 3, "precision": "bf16"}, {"stage": 0}, {"offload": {"optimizer": "host"}}):
        model = fresh()
        engine = zero.initialize(model, adamw(model), zero.Config(timeout=10, **settings))
        with pytest.raises(zero.UsageError, match="last backward"):
            engine.parameter_statistics()
        engine.backward(language_loss(model, 0, context.rank))
        for number, parameter in enumerate(p for p in model.parameters() if p.grad is not None):
            parameter.grad.mul_(torch.tensor(2.0) if number % 2 else -0.25)  # type: ignore[union-attr]
        before = engine.traffic.calls["all_reduce"]
        found = engine.parameter_statistics()
        assert engine.traffic.calls["all_reduce"] <= before + 1
        assert found.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
        for name, mine in found.items():
            master, gradient = engine.full_master(name), engine.full_gradient(name)
            assert near(mine.norm, master)
            assert mine.histogram.tolist() == counted(master)
            if gradient is None:
                assert mine.gradient_norm is None
                continue
            assert near(mine.gradient_norm, gradient)
            assert mine.gradient_histogram is not None
            assert mine.gradient_histogram.tolist() == counted(gradient)


def test_statistics_are_those_of_whole_values(cluster: Clusters) -> None:
    cluster(2).run(statistics_body)


def test_more_values_than_fp32_counts() -> None:
    """Counts are exact beyond 2**24 values of a kind, in as many parts as these need."""
    row = _row(torch.ones(1).expand(20_000_000), (torch.tensor(1.5), 2.0))
    assert row[0] == 9 * 20_000_000
    assert row[1:].tolist() == [20_000_000.0 if edge == 2.0 else 0.0 for edge in EDGES[:-1]]
