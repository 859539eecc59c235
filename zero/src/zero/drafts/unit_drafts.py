"""Units before they are built: their groups, how each group travels, and where its state will be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from accelz import dense_stride
from zero.communication.communicator import Communicator
from zero.communication.quantised import block_of
from zero.config.training import Config, dtype_named
from zero.drafts.preparation import Prepared
from zero.gradients.group_gradients import GradientPolicy
from zero.optimizer.stepping import Stepping, of_unknown, stepping_ranks
from zero.sharding.distributed import local_of
from zero.sharding.gather_format import GatherOptions
from zero.sharding.layout import FlatLayout, ParameterSpec
from zero.sharding.layout import plan as lay_out
from zero.sharding.own_codes import code_dtype
from zero.sharding.units import UnitPlan
from zero.tiers.placement import Placement, PlacementRequest, Placer
from zero.tiers.stores import Stores
from zero.tiers.swap_file import PAGE
from zero.tiers.tier import Tier
from zero.tiers.values import Column, at_least_fp32, longest_block
from zero.warning import warn

Named = tuple[str, nn.Parameter]
Sharing = Callable[[frozenset[str]], int]


@dataclass(frozen=True)
class GroupKind:
    """What all parameters of a group have in common. apart: the dimensions of the mesh along which other
    ranks have other values in their place."""

    dtype: torch.dtype
    trainable: bool
    gather_options: GatherOptions
    stepping: Stepping
    apart: frozenset[str]

    @property
    def master(self) -> torch.dtype:
        """The dtype of masters; of split ones, that of the remainders."""
        rule = self.stepping.rule
        return at_least_fp32(self.dtype) if rule is None else rule.master(self.dtype)

    @property
    def moments(self) -> tuple[Column, ...]:
        """What a kernel keeps beside a master."""
        rule = self.stepping.rule
        return () if rule is None else rule.columns(at_least_fp32(self.dtype))


@dataclass(frozen=True)
class GroupDraft:
    """A group before it is built. named: its parameters with their names. shared_by: how many ranks share a
    copy. stepped_by: see `GroupStepping`."""

    named: tuple[Named, ...]
    kind: GroupKind
    shared_by: int
    layout: FlatLayout
    placement: Placement
    stepped_by: tuple[int, ...] | None


@dataclass(frozen=True)
class UnitDraft:
    """A unit before it is built. whole: every rank keeps the unit's whole parameters."""

    plan: UnitPlan
    whole: bool
    groups: tuple[GroupDraft, ...]

    @property
    def is_resident(self) -> bool:
        """Whether the unit's whole buffers stay on the device. They also do on a rank that shares its copy
        with no other."""
        return self.whole or all(g.shared_by == 1 and g.placement.params.near for g in self.groups)


def draft_units(
    prepared: Prepared,
    config: Config,
    placer: Placer,
    sharing: Sharing,
    moments: Mapping[nn.Parameter, float],
) -> list[UnitDraft]:
    """Divide units into groups, and decide in which tier the state of each group will be. Changes nothing.

    sharing: how many ranks share a copy of parameters, by the dimensions along which these differ. moments:
    how many values optimizers keep per element of each parameter; empty if no setting limits the memory of
    optimizer state.
    """
    wholes = [(plan, config.stage < 3 or plan.persistent) for plan in prepared.plans]
    units = [(plan, whole, _partition(plan, whole, config, prepared, sharing)) for plan, whole in wholes]
    kinds = [(kind, named, whole) for _, whole, groups in units for kind, named in groups.items()]

    def shards(kind: GroupKind) -> int:
        return sharing(kind.apart) if config.stage > 0 else 1

    stepped_by = stepping_ranks(
        (kind.stepping, shards(kind), [p for _, p in named]) for kind, named, _ in kinds
    )
    policy = GradientPolicy.of(config, sharing(frozenset()))
    layouts = [_layout_of(kind, named, shards(kind)) for kind, named, _ in kinds]
    requests = []
    for (kind, named, whole), layout in zip(kinds, layouts, strict=True):
        sizes = layout.shard_numel, kind.dtype.itemsize, policy.slice_dtype(kind.dtype).itemsize
        divisible = kind.stepping.rule is not None
        beside = _state_beside(kind, named, layout, stepped_by, moments)
        requests.append(
            PlacementRequest(*sizes, kind.trainable, whole, kind.master, kind.moments, divisible, beside)
        )
    placed = zip(layouts, placer.place(requests), strict=True)  # in the order of units and groups
    drafts = []
    for plan, whole, groups in units:
        drafted = []
        for kind, named in groups.items():
            layout, placement = next(placed)
            ranks = tuple(stepped_by[p] for _, p in named if p in stepped_by) or None
            shared_by = sharing(kind.apart)
            drafted.append(GroupDraft(tuple(named), kind, shared_by, layout, placement, ranks))
        drafts.append(UnitDraft(plan, whole, tuple(drafted)))
    return drafts


def reserve_disk(
    drafts: Sequence[UnitDraft], config: Config, stores: Stores, communicator: Communicator
) -> None:
    """Reserve the space of all state on disk. Collective.

    Warns if a rank's file system reads and writes through the page cache. Raises OffloadError, on every rank,
    if any of them finds no space.
    """
    policy = GradientPolicy.of(config, communicator.group.size)
    nbytes = Counter[Tier]()
    for group in (group for draft in drafts for group in draft.groups):
        dtype = group.kind.dtype
        nbytes += stores.disk_bytes(
            group.layout.shard_numel, dtype, group.placement, policy.place_dtype(dtype)
        )
    if nbytes:
        through_cache = False
        with communicator.postponing_disk_errors():
            through_cache = stores.reserve(nbytes)
        if communicator.agree(through_cache):
            warn(
                f"the file system of {config.offload.path} does not support O_DIRECT in pages of {PAGE} "
                "bytes: state on disk goes through the page cache",
                rank=communicator.group.rank,
            )


def _target_dtype(parameter: nn.Parameter, config: Config, exact: Collection[nn.Parameter]) -> torch.dtype:
    """Return the dtype that the parameter will have in the engine."""
    dtype = dtype_named(config.precision)
    return dtype if dtype and parameter.is_floating_point() and parameter not in exact else parameter.dtype


def _layout_of(kind: GroupKind, named: Sequence[Named], shards: int) -> FlatLayout:
    local = [(name, local_of(parameter)) for name, parameter in named]
    specs = [ParameterSpec(name, tuple(p.shape), dense_stride(p), p.numel()) for name, p in local]
    block = max(block_of(kind.gather_options.quant_dtype), longest_block(kind.moments))
    return lay_out(specs, shards, kind.dtype.itemsize, block)


def _state_beside(
    kind: GroupKind,
    named: Sequence[Named],
    layout: FlatLayout,
    stepped_by: Mapping[nn.Parameter, int],
    moments: Mapping[nn.Parameter, float],
) -> tuple[int, ...]:
    """The bytes of state that each rank keeps for a group that the user's optimizer steps itself; empty if
    none, or if `moments` is empty.

    stepped_by: the ranks of parameters that are stepped whole. moments: as in `draft_units`.
    """
    if kind.stepping.rule is not None or not kind.trainable or not moments:
        return ()
    wide, shards = max(kind.dtype.itemsize, 4), layout.shards
    kept = {parameter: moments.get(parameter, 0) for _, parameter in named}
    if not kind.stepping.whole and shards > 1:
        return (layout.shard_numel * math.ceil(max(kept.values())) * wide,) * shards
    found = Counter[int]()
    for parameter, values in kept.items():
        elements = (parameter if kind.stepping.across else local_of(parameter)).numel()
        found[stepped_by.get(parameter, 0)] += math.ceil(elements * values) * wide
    if kind.stepping.across:  # of the ranks that have the same slices of other blocks, the one with most
        return (max(found.values()),) * shards
    return tuple(found[rank] for rank in range(shards))


def _partition(
    plan: UnitPlan, whole: bool, config: Config, prepared: Prepared, sharing: Sharing
) -> dict[GroupKind, list[Named]]:
    """Return a unit's parameters by kind; those of one param group are adjacent, for a single kernel call."""
    groups: dict[GroupKind, list[Named]] = {}
    param_group_of, stepping = prepared.param_group_of, prepared.stepping
    unknown = of_unknown(stepping, config)
    for name, parameter in plan.parameters:
        dtype = _target_dtype(parameter, config, prepared.exact)
        stepped = stepping.get(parameter, unknown) if parameter.requires_grad else Stepping()
        apart = prepared.apart.get(parameter, frozenset())
        gathered = GatherOptions()  # of what every rank keeps whole, which no forward gathers
        if not whole:
            gathered = _gather_options(parameter, dtype, config, prepared, alone=sharing(apart) == 1)
        kind = GroupKind(dtype, parameter.requires_grad, gathered, stepped, apart)
        groups.setdefault(kind, []).append((name, parameter))
    last = max(param_group_of.values(), default=0) + 1  # parameters the optimizer does not know come last
    for named in groups.values():
        named.sort(key=lambda item: param_group_of.get(item[1], last))
    return groups


def _gather_options(
    parameter: nn.Parameter, dtype: torch.dtype, config: Config, prepared: Prepared, alone: bool
) -> GatherOptions:
    """What a parameter, in the engine in `dtype`, may be converted to when its unit is gathered.

    Vectors are never rounded to 8 bits: most are shorter than a block with one scale, and a norm's weights do
    not tolerate it. alone: whether the parameter is on one rank only, and travels to no other.
    """
    # torch's compiler does not see into parameters that make codes of themselves.
    own = None if alone or config.compile is not None else code_dtype(parameter)
    if own is not None:
        return GatherOptions(own, own=True)
    matrix = parameter.is_floating_point() and parameter.dim() > 1
    coded = matrix and not alone and parameter not in prepared.exact
    narrows = dtype is torch.float32 and parameter in prepared.castable
    return GatherOptions(dtype_named(config.gather_dtype) if coded else None, narrows)
