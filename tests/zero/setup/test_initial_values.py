"""Ranks that come with different values: told where only some modules differ, and never where seeds do."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import LanguageModel
from tests.zero.helpers.training import adamw


class Expert(nn.Module):
    """A class of the program's own; its parameters are known to torch no more than those of any other."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 8))
        self.steps = nn.Parameter(torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.steps


class Mixture(nn.Module):
    """Layers of a projection, experts and a normalisation. seeded: a seed for the experts alone."""

    def __init__(self, seeded: int | None = None, kind: Callable[[], nn.Module] = Expert) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.project = nn.Linear(8, 8)
            before = torch.get_rng_state()
            if seeded is not None:
                torch.default_generator.manual_seed(seeded)
            layer.experts = nn.ModuleList(kind() for _ in range(2))
            if seeded is not None:
                torch.set_rng_state(before)
            layer.norm = nn.LayerNorm(8)
            self.layers.append(layer)
        self.register_buffer("table", torch.arange(8.0))


def resized(rank: int) -> nn.Module:
    """A table of which rows were added, at random on each rank."""
    model = nn.ModuleDict({"table": nn.Embedding(3000, 8), "head": nn.Linear(8, 8)})
    torch.manual_seed(rank)
    with torch.no_grad():
        model["table"].weight[-8:] = torch.randn(8, 8)
    return model


def offset(rank: int) -> nn.Module:
    model = Mixture()
    model.table += rank
    return model


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def born_sharded(rank: int) -> nn.Module:
    with zero.init():
        return Mixture(seeded=rank)


CASES: dict[str, Callable[[int], nn.Module]] = {
    "experts": lambda rank: Mixture(seeded=rank),
    "experts of torch's layers": lambda rank: Mixture(rank, lambda: nn.Linear(8, 8)),
    "experts in bf16": lambda rank: Mixture(seeded=rank).bfloat16(),
    "experts under zero.init": born_sharded,
    "rows": resized,
    "a buffer": offset,
    "nothing": lambda rank: Mixture(),
    "all seeds": lambda rank: seeded(rank, Mixture),
    "all seeds, and constants that vary": lambda rank: seeded(rank, LanguageModel),
    "all seeds, under another class": lambda rank: seeded(rank, lambda: Mixture(seeded=2 + rank)),
    "constants": lambda rank: nn.LayerNorm(8),
}
EXPERTS = "different values, and others with the same: layers.0.experts, layers.1.experts. All ranks now"
FOUND = {
    **dict.fromkeys([case for case in CASES if case.startswith("experts")], EXPERTS),
    "rows": "others with the same: table. All ranks now",
    "a buffer": "others with the same: table. All ranks now",
}


def cases_body(context: Context, stage: int) -> dict[str, list[str]]:
    found = {}
    for case, make in CASES.items():
        model = seeded(7, lambda make=make: make(context.rank))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", ".* does not declare storage_resize")
            zero.initialize(model, adamw(model), zero.Config(stage=stage, timeout=20))
        found[case] = [str(warning.message) for warning in caught]
    return found


def test_ranks_that_differ_in_some_modules_are_told(cluster: Clusters) -> None:
    for stage in (0, 3):
        first, second = cluster(2).run(cases_body, stage=stage)
        for case, messages in first.items():
            assert len(messages) == (case in FOUND), (case, messages)
            assert all(FOUND[case] in message for message in messages), (case, messages)
        assert not any(second.values()), second


def large_body(context: Context) -> tuple[int, bool]:
    """A unit that is broadcast in several pieces, of which the last is shorter."""
    torch.manual_seed(context.rank)
    model = nn.Linear(1200, 1000, bias=False)
    torch.manual_seed(0)
    first = nn.Linear(1200, 1000, bias=False).weight.detach()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=20))
    count = engine.traffic.calls["broadcast"]
    with zero.gathered(model):
        return count, torch.equal(model.weight.detach().cpu(), first)


def test_large_units_are_broadcast_in_pieces(cluster: Clusters) -> None:
    assert cluster(2).run(large_body) == [(2, True)] * 2
