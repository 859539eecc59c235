"""From a model to sharded units: checks that touch nothing, then one unit after another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelz.accelerator import Accelerator
from accelz.flat_buffer import unshare
from zero import deferred_init, layout
from zero.communicator import Communicator
from zero.config import DTYPES, Config
from zero.errors import ConfigError, ModelError
from zero.flat_group import FlatGroup
from zero.group_gradients import GradientPolicy
from zero.guard import LOST, NAME_ATTRIBUTE, REASON_ATTRIBUTE, ShardedParameter, is_lost
from zero.layout import ParameterSpec
from zero.quantised import block_of
from zero.room import room_for
from zero.sharded_unit import ShardedUnit
from zero.tiers.placement import Candidate, Placement, Planner
from zero.tiers.stores import Stores
from zero.units import UnitPlan

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def check_model(model: nn.Module) -> None:
    """Raise ModelError if the model cannot be sharded. Changes nothing."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise ModelError(
            f"the model is wrapped in {type(model).__name__}, which would reduce all gradients a second "
            "time; pass the model itself (model.module)"
        )
    named = list(model.named_parameters())
    if not named:
        raise ModelError("the model has no parameters")
    for name, parameter in named:
        _check_parameter(name, parameter)
    _check_overlaps(named)


def check_dtypes(model: nn.Module, config: Config, accelerator: Accelerator) -> None:
    """Raise ConfigError where the device does not have a dtype that training would use."""
    wanted = (
        {config.dtype} if config.dtype else {p.dtype for p in model.parameters() if p.is_floating_point()}
    )
    if config.reduce_dtype:
        wanted.add(DTYPES[config.reduce_dtype])
    missing = wanted - accelerator.capabilities.dtypes
    if missing:
        have = ", ".join(sorted(str(d) for d in accelerator.capabilities.dtypes))
        raise ConfigError(
            f"the device {accelerator.name!r} does not support {', '.join(str(d) for d in missing)} "
            f"(it has {have}); choose another precision"
        )


def check_equal(
    plans: Sequence[UnitPlan],
    config: Config,
    communicator: Communicator,
    param_group_of: dict[nn.Parameter, int],
) -> None:
    """Collective. Raise RankMismatchError where ranks bring different models or tiers. Changes nothing."""
    communicator.check_equal("the model", _digest(plans, config, param_group_of))
    tiers = config.tiers.model_dump_json(exclude={"path"})  # each rank may have a directory of its own
    communicator.check_equal("Config(offload=...)", crc32(tiers.encode()))


@dataclass(frozen=True)
class GroupDraft:
    """A group before it is built: its parameters by name, and where its state will be. codes: the 8-bit dtype
    that they travel in; None for what they are."""

    named: tuple[tuple[str, nn.Parameter], ...]
    dtype: torch.dtype
    shard_numel: int
    placement: Placement
    codes: torch.dtype | None


@dataclass(frozen=True)
class UnitDraft:
    """whole: every rank keeps the unit's whole parameters."""

    plan: UnitPlan
    whole: bool
    groups: tuple[GroupDraft, ...]


def draft_units(
    plans: Sequence[UnitPlan],
    config: Config,
    planner: Planner,
    world_size: int,
    param_group_of: dict[nn.Parameter, int],
) -> list[UnitDraft]:
    """Cut units into groups, and decide where the state of each goes. Changes nothing."""
    shards = world_size if config.stage > 0 else 1
    whole = [config.stage < 3 or plan.persistent for plan in plans]
    codes = [None if resident or world_size == 1 else config.codes for resident in whole]
    parts = [_partition(plan, config, param_group_of, c) for plan, c in zip(plans, codes, strict=True)]
    policy = GradientPolicy.of(config, world_size)
    candidates = [
        _candidate(part, policy.slice_dtype(part.dtype), shards, resident)
        for groups, resident in zip(parts, whole, strict=True)
        for part in groups
    ]
    placed = zip(candidates, planner.place(candidates), strict=True)
    drafts = []
    for plan, groups, resident in zip(plans, parts, whole, strict=True):
        of_plan = [(part, *next(placed)) for part in groups]
        mine = tuple(
            GroupDraft(tuple(part.named), part.dtype, candidate.shard_numel, placement, part.codes)
            for part, candidate, placement in of_plan
        )
        drafts.append(UnitDraft(plan, resident, mine))
    return drafts


def reserve_disk(
    drafts: Sequence[UnitDraft], config: Config, stores: Stores, communicator: Communicator
) -> None:
    """Collective. Take the space of all state on disk. Raises OffloadError, on every rank, where one of them
    finds none."""
    policy = GradientPolicy.of(config, communicator.group.size)
    nbytes = sum(
        stores.disk_bytes(g.shard_numel, g.dtype, g.placement, policy.slice_dtype(g.dtype))
        for draft in drafts
        for g in draft.groups
    )
    if nbytes:
        with communicator.postponing():
            stores.reserve(nbytes)
        communicator.agree()


def build_units(
    drafts: Sequence[UnitDraft], config: Config, stores: Stores, communicator: Communicator
) -> list[ShardedUnit]:
    """Flatten, equalise over the ranks (rank 0's values win) and shard, one unit at a time."""
    unshare(parameter for draft in drafts for _, parameter in draft.plan.parameters)
    return [_build_unit(index, draft, config, stores, communicator) for index, draft in enumerate(drafts)]


def _build_unit(
    index: int, draft: UnitDraft, config: Config, stores: Stores, communicator: Communicator
) -> ShardedUnit:
    group, accelerator, plan = communicator.group, stores.accelerator, draft.plan
    shards, shard = (group.size, group.rank) if config.stage > 0 else (1, 0)
    resident = draft.whole or (group.size == 1 and all(g.placement.params == "device" for g in draft.groups))
    awaited = all(deferred_init.promised(p) for _, p in plan.parameters)
    nbytes = sum(p.numel() * _target(p, config).itemsize for _, p in plan.parameters)
    with room_for(accelerator, "to shard", plan.name, nbytes):
        deferred_init.materialize(p for _, p in plan.parameters)
        groups = [
            FlatGroup(stores, part.placement, plan.name, part.named, part.dtype, shards, shard, part.codes)
            for part in draft.groups
        ]
        if group.size > 1 and not awaited:
            for flat in groups:
                communicator.broadcast(plan.name, flat.home.data, 0)
        unit = ShardedUnit(index, plan.name, plan.anchors, groups, communicator, resident)
        unit.settle()
    for name, parameter in plan.parameters:
        parameter.__dict__[NAME_ATTRIBUTE] = name
        parameter.__dict__.pop(REASON_ATTRIBUTE, None)
    return unit


@dataclass(frozen=True)
class _Part:
    """What of a unit becomes one group."""

    named: list[tuple[str, nn.Parameter]]
    dtype: torch.dtype
    codes: torch.dtype | None


def _candidate(part: _Part, gradient: torch.dtype, shards: int, resident: bool) -> Candidate:
    specs = [ParameterSpec(name, tuple(p.shape), p.stride(), p.numel()) for name, p in part.named]
    itemsize, trainable = part.dtype.itemsize, part.named[0][1].requires_grad
    numel = layout.plan(specs, shards, itemsize, block_of(part.codes)).shard_numel
    return Candidate(numel, itemsize, gradient.itemsize, trainable, resident)


def _partition(
    plan: UnitPlan, config: Config, param_group_of: dict[nn.Parameter, int], codes: torch.dtype | None
) -> list[_Part]:
    """Parameters by dtype, whether they are trainable, and what they travel in, each list ordered by param
    group so that runs are long. Only matrices travel in codes: they have enough values for blocks of their
    own, and stand a rounding that a norm's weights would not."""
    parts: dict[tuple[torch.dtype, bool, torch.dtype | None], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in plan.parameters:
        travels = codes if parameter.is_floating_point() and parameter.dim() > 1 else None
        key = _target(parameter, config), parameter.requires_grad, travels
        parts.setdefault(key, []).append((name, parameter))
    last = max(param_group_of.values()) + 1  # parameters the optimizer does not know come last
    for named in parts.values():
        named.sort(key=lambda item: param_group_of.get(item[1], last))
    return [_Part(named, dtype, travels) for (dtype, _, travels), named in parts.items()]


def _target(parameter: nn.Parameter, config: Config) -> torch.dtype:
    return config.dtype if config.dtype and parameter.is_floating_point() else parameter.dtype


def _digest(plans: Sequence[UnitPlan], config: Config, param_group_of: dict[nn.Parameter, int]) -> int:
    """What all ranks must have in common."""
    text = [
        f"{config.stage} {config.precision} {config.gather_dtype} {config.gradient_accumulation_steps} "
        f"{config.accumulate}"
    ]
    for plan in plans:
        text.append(plan.name)
        text.extend(
            f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad} {param_group_of.get(p)} "
            f"{deferred_init.promised(p)}"
            for name, p in plan.parameters
        )
    return crc32("\n".join(text).encode())


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        raise ModelError(f"parameter {name!r} is lazy and has no shape yet; run the model once first")
    if is_lost(parameter):
        raise ModelError(f"this model cannot be used any more: see parameter {name!r}, {LOST}")
    if isinstance(parameter, ShardedParameter) or NAME_ATTRIBUTE in parameter.__dict__:
        if not deferred_init.is_deferred(parameter):
            raise ModelError(f"parameter {name!r} belongs to an engine already; one model has one engine")
        return
    if parameter.is_meta:
        raise ModelError(
            f"parameter {name!r} is on the meta device and has no values; build the model under "
            "`with zero.init(config):` instead of torch.device('meta')"
        )
    if is_traceable_wrapper_subclass(parameter):
        raise ModelError(
            f"parameter {name!r} is a {type(parameter).__name__}, whose values lie in tensors inside of "
            "it; zero shards plain parameters: leave out fully_shard, tensor parallelism and quantization"
        )
    if parameter.is_complex() or parameter.layout is not torch.strided:
        raise ModelError(
            f"parameter {name!r} is {parameter.dtype}, {parameter.layout}; only dense, real "
            "parameters can be sharded (view_as_real gives the real form of a complex one)"
        )


def _check_overlaps(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Two Parameter objects over the same memory would be torn apart by flattening."""
    spans = []
    for name, parameter in named:
        if deferred_init.is_deferred(parameter) or parameter.numel() == 0:
            continue
        start = parameter.data_ptr()
        reach = sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True)) + 1
        spans.append((start, start + reach * parameter.element_size(), name))
    spans.sort()
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise ModelError(
                f"parameters {first!r} and {second!r} are different Parameter objects over the same memory; "
                "tie them by assigning one Parameter to both modules"
            )
