"""Optimizers of whole parameters as the user has them: what they show, and what is refused or told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import (
    adamw,
)
from tests.zero.helpers.whole_optimizers import (
    _is_muons,
    adafactor,
    muon,
    trust,
)


def face_body(context: Context) -> dict[str, Any]:
    """What the user's optimizers show and refuse while an engine steps them."""
    model = fresh()
    optimizers = muon(model)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in optimizers]
    config = zero.Config(timeout=20, gradient_accumulation_steps=1)
    engine = zero.initialize(model, optimizers, config)
    engine.backward(language_loss(model, 0, context.rank))
    hooked: list[str] = []
    schedulers.append(torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=1.0))
    for each in (*optimizers, engine.optimizer):
        each.register_step_pre_hook(lambda o, args, kwargs: ((*args,), kwargs))
        each.register_step_post_hook(lambda o, *_: hooked.append(type(o).__name__))
    for each in optimizers:
        with pytest.raises(zero.UsageError, match=r"call engine\.step"):
            each.step()
        with pytest.raises(zero.UsageError, match=r"engine\.save_checkpoint"):
            each.state_dict()
    engine.traffic.clear()
    engine.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a scheduler that has seen no step
        for scheduler in schedulers:
            scheduler.step()
    sizes = [p.numel() for group in engine.optimizer.param_groups for p in group["params"]]
    pieces = [piece for group in engine.optimizer.param_groups for piece in group["params"]]
    for use in (lambda p: p.tolist(), lambda p: p.lerp_(p, 0.5), lambda p: p.data, lambda p: p.norm()):
        with (
            torch.no_grad(),
            pytest.raises(zero.ShardedParameterError, match=r"it is here only during a step"),
        ):
            use(pieces[0])
    return {
        "hooked": hooked,
        "rates": [group["lr"] for group in engine.optimizer.param_groups],
        "mine": sum(sizes),
        "stepped": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "whole": sum(p.numel() for n, p in model.named_parameters() if p.requires_grad and _is_muons(n, p)),
        "state": sum(v.numel() for s in engine.optimizer.state.values() for v in s.values() if v.dim()),
        "bytes": engine.traffic.bytes["all_to_all"],
    }


def test_the_optimizers_stay_the_users(cluster: Clusters) -> None:
    found = cluster(2).run(face_body)
    for each in found:
        assert each["hooked"] == ["Muon", "AdamW", "JointOptimizer"]
        assert each["rates"] == [5e-3, 5e-3]
        assert each["bytes"] == 3 * 4 * each["whole"]  # gradients, masters, and these back
    assert sum(each["mine"] for each in found) == found[0]["stepped"]
    assert max(each["mine"] for each in found) <= 4 / 3 * found[0]["stepped"] / 2
    assert all(each["state"] for each in found)


def refusals_body(context: Context) -> list[str]:
    def told(optimizer: Callable[[nn.Module], Any], **settings: Any) -> str:
        model = fresh()
        with pytest.raises(zero.ZeroError) as caught:
            zero.initialize(model, optimizer(model), zero.Config(timeout=20, **settings))
        return f"{type(caught.value).__name__}: {caught.value}"

    return [
        told(muon, whole_parameters=False),
        told(adamw, whole_parameters=True),
        told(muon, offload=zero.Offload(optimizer="disk", path=".")),
        told(muon, offload=zero.Offload(optimizer="host", step="device")),
        told(lambda model: []),
        told(lambda model: [adamw(model), None]),
        told(lambda model: [adamw(model), torch.optim.SGD([model.gain], lr=1)]),
        told(lambda model: [adamw(model), torch.optim.LBFGS([nn.Parameter(torch.ones(2))])]),
    ]


REFUSED = (
    "OptimizerError: Muon needs whole matrices",
    "OptimizerError: AdamW works element by element",
    "ConfigError: Offload(optimizer='disk') serves optimizers that kernels step: Adam, AdamW, SGD, Lion. "
    "This Muon",
    "ConfigError: Offload(step='device') serves optimizers that kernels step: Adam, AdamW, SGD, Lion. This "
    "Muon",
    "OptimizerError: the list of optimizers is empty",
    "OptimizerError: expected a torch.optim.Optimizer or a list of them, got NoneType",
    "OptimizerError: a parameter of shape () is in two optimizers, AdamW and SGD",
    "OptimizerError: LBFGS cannot be sharded",
)


@pytest.mark.parametrize("size", [1, 2])
def test_what_cannot_be_is_refused(cluster: Clusters, size: int) -> None:
    for messages in cluster(size).run(refusals_body):
        for message, start in zip(messages, REFUSED, strict=True):
            assert message.startswith(start), message


def mismatch_body(context: Context, path: str) -> list[str]:
    def raised(call: Callable[[], object]) -> str:
        with pytest.raises(zero.ZeroError) as caught:
            call()
        return f"{type(caught.value).__name__}: {caught.value}"

    def built(optimizers: Callable[[list[nn.Parameter]], list[Optimizer]]) -> zero.Engine:
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        return zero.initialize(model, optimizers(list(model.parameters())), zero.Config(timeout=10))

    def two(p: list[nn.Parameter]) -> list[Optimizer]:
        return [torch.optim.Muon(p[:2]), torch.optim.AdamW(p[2:])]

    saved = built(two)
    saved.backward(saved(torch.ones(2, 8, device=context.accelerator.device)).sum())
    saved.step()
    saved.save_checkpoint(path)
    other = built(lambda p: [torch.optim.Muon(p[:1]), torch.optim.AdamW(p[1:])])
    grouped = built(lambda p: [torch.optim.Muon(p[:1]), torch.optim.AdamW([{"params": [q]} for q in p[1:]])])
    late = built(two)
    extended = late.optimizer.optimizers[1]  # type: ignore[attr-defined]
    extended.param_groups.append({**extended.param_groups[0], "params": [nn.Parameter(torch.ones(2))]})
    late.backward(late(torch.ones(2, 8, device=context.accelerator.device)).sum())
    ranks_differ = lambda p: [torch.optim.NAdam(p) if context.rank else torch.optim.RAdam(p)]  # noqa: E731
    momenta = (0.9, 0.0, 0.0) if context.rank else (0.9, 0.9, 0.0)
    options_differ = lambda p: [torch.optim.SGD([q], momentum=m) for q, m in zip(p, momenta, strict=True)]  # noqa: E731
    return [
        raised(lambda: other.load_checkpoint(path)),
        raised(lambda: grouped.load_checkpoint(path)),
        raised(late.step),
        raised(lambda: built(ranks_differ)),
        raised(lambda: built(options_differ)),
    ]


def test_optimizers_that_do_not_fit_are_found(cluster: Clusters, tmp_path: Path) -> None:
    for messages in cluster(2).run(mismatch_body, path=str(tmp_path / "step-1")):
        assert messages[0].startswith(
            "StateError: the checkpoint does not fit: with different optimizer state: 1.weight "
            "(momentum_buffer)"
        )
        assert messages[1].startswith("StateError: the checkpoint's optimizer has 2 param_groups")
        assert messages[2].startswith(
            "OptimizerError: the optimizer's param_groups have different parameters"
        )
        for differing in messages[3:]:
            assert differing.startswith("RankMismatchError: the ranks disagree about the optimizer")


def test_what_may_look_at_all_parameters_is_told(cluster: Clusters) -> None:
    assert cluster(1).run(warning_body) == [["Trust will step whole parameters, each on one rank"]]


def warning_body(context: Context) -> list[str]:
    def told(optimizer: Callable[[nn.Module], Any], **settings: Any) -> list[str]:
        model = fresh()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", ".* does not declare storage_resize")
            zero.initialize(model, optimizer(model), zero.Config(timeout=20, **settings))
        return [str(each.message).split(".")[0] for each in caught]

    known: list[Callable[[nn.Module], Any]] = [
        adafactor,
        muon,
        adamw,
        lambda model: zero.Lion(model.parameters(), lr=torch.tensor(1e-3)),
    ]
    quiet = [told(optimizer) for optimizer in known]
    quiet += [told(trust, whole_parameters=True), told(trust, stage=0)]
    assert not any(quiet), quiet
    return told(trust)
