"""`zero.plan`: what a configuration will take, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zero.communication.grid import Grid
from zero.config.training import Config, dtype_named
from zero.drafts.arrangement import arrangement
from zero.drafts.checks import META, check_model
from zero.drafts.preparation import prepare, settings
from zero.drafts.unit_drafts import UnitDraft, draft_units
from zero.errors import ConfigError, UsageError
from zero.gradients.group_gradients import GradientPolicy
from zero.optimizer.state_size import moments_of
from zero.planning.activations import Activations, Flops, measure
from zero.planning.groups import PlannedUnit, UnitPlanner
from zero.planning.memory import MemoryPlan, plan_memory
from zero.planning.step_time import Rates, TimePlan, plan_time
from zero.planning.text import describe
from zero.planning.traffic import TrafficPlan, plan_traffic
from zero.sharding.distributed import is_distributed
from zero.sharding.exact import computes_in
from zero.tiers.placement import Placer
from zero.tiers.tier import ON_HOST

AUTOCAST = (torch.bfloat16, torch.float16, torch.float32)
"""What `torch.autocast` casts to."""


@dataclass(frozen=True)
class Plan:
    """What one rank takes, in bytes, operations and seconds; `str()` of it is for people.

    ranks: those with different data. parameters, trainable: elements of the whole model. flops: None without
    a batch. time: None where nothing is known of what is done in a second, or nothing of it is to be done.
    """

    config: Config
    ranks: int
    parameters: int
    trainable: int
    units: tuple[PlannedUnit, ...]
    memory: MemoryPlan
    traffic: TrafficPlan
    flops: Flops | None
    time: TimePlan | None

    def __str__(self) -> str:
        frozen = self.parameters - self.trainable
        head = [
            f"{self.parameters:,} parameters" + (f", {frozen:,} of them frozen" if frozen else ""),
            f"stage {self.config.stage}, precision {self.config.precision!r}",
            f"{_count(len(self.units), 'unit')}; {_count(self.ranks, 'rank')}, bytes of each:",
        ]
        return "\n".join((*head, "", describe(self.memory, self.traffic, self.flops, self.time)))


def plan(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    config: Config | None = None,
    *,
    ranks: int | None = None,
    mesh: DeviceMesh | None = None,
    data_dims: str | Sequence[str] | None = None,
    shard_dims: str | Sequence[str] | None = None,
    autocast: torch.dtype | None = None,
    batch: Any = None,
    peak_flops: float | None = None,
    link_bandwidth: float | None = None,
    host_bandwidth: float | None = None,
) -> Plan:
    """Plan memory, traffic and least time of `zero.initialize(model, optimizer, config)` on `ranks` ranks.

    Needs no device and no other rank, and changes nothing. The model needs no memory either: build it under
    torch.device("meta"), or under `zero.init`. The plan covers model state in the steady state of eager
    training, on a device with memory of its own whose kernels step the optimizer, and the traffic of an
    optimizer step; with a batch, activations too. It does not include the modules' buffers, temporaries of
    libraries and of torch's own optimizers, what graphs keep of activations (`Compile(graphs=True)`), or the
    scratch memory of a captured step. offload="auto" is planned as it begins, with the optimizer's state on
    the host.

    mesh, data_dims, shard_dims: in place of `ranks`, as in `zero.initialize`, for this process's place in the
    mesh. Parameters that are DTensors are planned by their blocks, and those of `Config(local_modules=...)`
    by the ranks that have the same. What tensor parallelism itself moves is not in the plan. A mesh of any
    size can be had in one process, with torch's process group "fake".

    autocast: dtype of `torch.autocast` around the forward; None for no autocast. Casts that it makes of
    parameters that stay whole count as activations.

    batch: what one rank gives to a forward: a mapping of keyword arguments, a tuple or list of arguments, or
    one tensor. Only sizes and dtypes count: tensors on the meta device will do. The model then runs once
    without values, forward and backward, with its checkpointing; the backward begins from the `loss` in the
    outputs, or where there is none from means of them. What kernels keep is what the host's keep.

    peak_flops: operations that a device does in a second; with it and a batch, the plan has the time to
    compute. link_bandwidth: bytes that a rank sends to the others in a second: the bus bandwidth of
    collectives, which between nodes is that of a node's network. host_bandwidth: bytes in a second between
    device and host, each way, as `accelz bench` measures it. In place of None is what the accelerator
    declares that this process has chosen, if it has chosen one. No step is faster than `time.overlapped`
    (a roofline: Williams et al., 2009), unless the network itself makes reductions, graphs keep units
    gathered (`Compile(persist_budget=...)`), or products are in 8 bits and `peak_flops`, as where it is
    declared, is of those in 16.

    Raises what `initialize` raises for settings, models and optimizers that do not fit; UsageError for fewer
    than one rank, for ranks beside a mesh, for a dtype that `torch.autocast` does not cast to, for a
    batch where parameters are DTensors or the model cannot run without values, for what cannot be done in a
    second, and for `peak_flops` without a batch.
    """
    config = settings(config)
    grid = _grid(config, ranks, mesh, data_dims, shard_dims)
    if autocast not in (None, *AUTOCAST):
        raise UsageError(f"autocast must be {', '.join(map(str, AUTOCAST))} or None, got {autocast!r}")
    rates = Rates.given(peak_flops, link_bandwidth, host_bandwidth)
    if peak_flops is not None and batch is None:
        raise UsageError(
            f"peak_flops={peak_flops!r} is for the operations of a batch: give one too (on the command line, "
            "--batch and --sequence)"
        )
    check_model(model, META)
    _check_dtypes(model, config)
    prepared = prepare(model, optimizer, config, for_graphs=False, has_mesh=grid.told)
    moments = moments_of(prepared.optimizer, dtype_named(config.precision))
    placer = Placer(config.offload, ON_HOST)
    drafts = draft_units(prepared, config, placer, lambda apart: grid.size(grid.shards - apart), moments)
    every, replicas = grid.size(grid.data), grid.size(grid.data - grid.shards)
    policy = GradientPolicy.of(config, every)
    planner = UnitPlanner(model, drafts, config, policy, autocast, moments)
    units = tuple(map(planner.unit, drafts))
    scaled = every > 1 or config.clip_norm is not None or config.loss_scale is not None
    activations = flops = None
    if batch is not None:
        activations, flops = _run(model, drafts, units, batch, autocast)
        flops = flops.times(config.gradient_accumulation_steps or 1)
    memory = plan_memory(units, config, policy, scaled, replicas, activations)
    traffic = plan_traffic(units, config, policy, replicas)
    parameters = list(model.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    time = plan_time(flops, traffic, rates)
    return Plan(
        config, every, sum(p.numel() for p in parameters), trainable, units, memory, traffic, flops, time
    )


def _grid(
    config: Config,
    ranks: int | None,
    mesh: DeviceMesh | None,
    data_dims: str | Sequence[str] | None,
    shard_dims: str | Sequence[str] | None,
) -> Grid:
    if mesh is None and data_dims is None and shard_dims is None:
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise UsageError(f"ranks must be a whole number of at least 1, got {ranks!r}")
        return Grid.plain(ranks, config.shard_ranks)
    if ranks is not None:
        raise UsageError(f"ranks={ranks!r} and a mesh are both given: leave ranks out")
    arranged = arrangement(None, mesh, data_dims, shard_dims, config)
    assert arranged is not None
    return arranged.grid


def _run(
    model: nn.Module,
    drafts: Sequence[UnitDraft],
    units: Sequence[PlannedUnit],
    batch: Any,
    autocast: torch.dtype | None,
) -> tuple[Activations, Flops]:
    """Of one micro-batch."""
    if any(map(is_distributed, model.parameters())):
        raise UsageError("the activations of a model with DTensors are not planned: leave batch out")
    modules = {
        d.plan.name: d.plan.hooked_modules[0] for d, u in zip(drafts, units, strict=True) if not u.is_root
    }
    dtypes = {
        name: group.gathered
        for draft, unit in zip(drafts, units, strict=True)
        for parts, group in zip(draft.groups, unit.groups, strict=True)
        for name, _ in parts.named
    }
    return measure(model, modules, dtypes, batch, autocast)


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
