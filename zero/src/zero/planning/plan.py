"""`zero.plan`: what a configuration will take, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from zero.communication.grid import ranks_of_replica
from zero.config.training import Config, dtype_named
from zero.drafts.checks import check_model
from zero.drafts.preparation import prepare, settings
from zero.drafts.unit_drafts import draft_units
from zero.errors import ConfigError, UsageError
from zero.gradients.group_gradients import GradientPolicy
from zero.optimizer.state_size import moments_of
from zero.planning.groups import PlannedUnit, UnitPlanner
from zero.planning.memory import MemoryPlan, plan_memory
from zero.planning.text import describe
from zero.planning.traffic import TrafficPlan, plan_traffic
from zero.sharding.exact import computes_in
from zero.tiers.placement import Placer
from zero.tiers.tier import ON_HOST

AUTOCAST = (torch.bfloat16, torch.float16, torch.float32)
"""What `torch.autocast` casts to."""


@dataclass(frozen=True)
class Plan:
    """What one rank takes, in bytes; `str()` of it is for people.

    parameters, trainable: elements of the whole model.
    """

    config: Config
    ranks: int
    parameters: int
    trainable: int
    units: tuple[PlannedUnit, ...]
    memory: MemoryPlan
    traffic: TrafficPlan

    def __str__(self) -> str:
        frozen = self.parameters - self.trainable
        head = [
            f"{self.parameters:,} parameters" + (f", {frozen:,} of them frozen" if frozen else ""),
            f"stage {self.config.stage}, precision {self.config.precision!r}",
            f"{_count(len(self.units), 'unit')}; {_count(self.ranks, 'rank')}, bytes of each:",
        ]
        return "\n".join((*head, "", describe(self.memory, self.traffic)))


def plan(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    config: Config | None = None,
    *,
    ranks: int,
    autocast: torch.dtype | None = None,
) -> Plan:
    """Plan the memory and traffic of `zero.initialize(model, optimizer, config)` on `ranks` ranks.

    Needs no device and no other rank, and changes nothing. The model needs no memory either: build it under
    torch.device("meta"), or under `zero.init`. The plan covers model state in the steady state of eager
    training, on a device with memory of its own whose kernels step the optimizer, and the traffic of an
    optimizer step. It does not include activations, the modules' buffers, or temporaries of libraries and of
    torch's own optimizers. offload="auto" is planned as it begins, with the optimizer's state on the host.

    autocast: dtype of `torch.autocast` around the forward; None for no autocast. Casts that it makes of
    parameters that stay whole count as activations.

    Raises what `initialize` raises for settings, models and optimizers that do not fit; UsageError for fewer
    than one rank, and for a dtype that `torch.autocast` does not cast to.
    """
    config = settings(config)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise UsageError(f"ranks must be a whole number of at least 1, got {ranks!r}")
    if autocast not in (None, *AUTOCAST):
        raise UsageError(f"autocast must be {', '.join(map(str, AUTOCAST))} or None, got {autocast!r}")
    sharing = ranks_of_replica(config.shard_ranks, ranks)
    check_model(model, shapes_only=True)
    _check_dtypes(model, config)
    prepared = prepare(model, optimizer, config, for_graphs=False)
    moments = moments_of(prepared.optimizer, dtype_named(config.precision))
    placer = Placer(config.offload, ON_HOST)
    drafts = draft_units(prepared, config, placer, lambda _: sharing, moments)
    policy = GradientPolicy.of(config, ranks)
    planner = UnitPlanner(model, drafts, config, policy, sharing, autocast, moments)
    units = tuple(map(planner.unit, drafts))
    scaled = ranks > 1 or config.clip_norm is not None or config.loss_scale is not None
    memory = plan_memory(units, config, policy, scaled, ranks // sharing)
    traffic = plan_traffic(units, config, policy, sharing, ranks // sharing)
    parameters = list(model.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    return Plan(config, ranks, sum(p.numel() for p in parameters), trainable, units, memory, traffic)


def _check_dtypes(model: nn.Module, config: Config) -> None:
    """Raise ConfigError for parameters that no device trains as they are."""
    narrow = {p.dtype for p in model.parameters() if p.requires_grad and not computes_in(p.dtype)}
    if narrow and dtype_named(config.precision) is None:
        raise ConfigError(
            f"parameters are {', '.join(sorted(map(str, narrow)))}, which no device can train in; choose a "
            "precision: 'bf16', 'fp16' or 'fp32'"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"
