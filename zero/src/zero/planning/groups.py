"""Units and groups as numbers: what `zero.initialize` would build, without building it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from zero.communication.quantised import Quantised
from zero.config.training import Config
from zero.drafts.unit_drafts import GroupDraft, UnitDraft
from zero.gradients.group_gradients import GradientPolicy
from zero.sharding.distributed import blocks_of, local_of
from zero.sharding.forms import as_parameter, inner_leaves
from zero.sharding.gather_format import EXACT, GatherFormat
from zero.sharding.units import PERSISTENT, ROOT
from zero.tiers.placement import Placement
from zero.tiers.tier import Tier
from zero.tiers.values import at_least_fp32

Dtype = torch.dtype | None
IN_A_SUM = 3  # gradients that autograd holds at once of a parameter used more than once: two, and their sum
IN_A_STEP = 2  # values per element of a parameter that is stepped whole: the parameter's and the gradient's


@dataclass(frozen=True)
class Stepped:
    """Parameters of a group that are stepped whole. Each has one rank that keeps its optimizer state and
    steps it. Ranks are given different amounts; these are the amounts of the rank with most, in the tier
    where the group's records are, of those that share these parameters.

    numel: elements that this rank steps. state: values that its optimizer keeps for them. of_all: elements
    that all ranks step. ranks: those that exchange slices, and blocks, of them. joins_blocks: whether these
    are put together from blocks. scattered: elements of the largest block, if it may go back to several
    slices.
    """

    numel: int
    state: int
    of_all: int
    ranks: int
    joins_blocks: bool
    scattered: int


@dataclass(frozen=True)
class PlannedGroup:
    """A flat buffer. Sizes in elements, padding included.

    numel, shard_numel: of the whole buffer, and of a rank's slice. ranks: those that share a copy of it.
    dtype: of the parameters. given: theirs before `zero.initialize`, where that is wider. gathered: the one
        they are computed in. coded: whether they travel in 8 bits. own_codes: whether they are computed with
        in 8 bits, too.
    resident: whether the whole buffer stays.
    reduced: dtype of the whole buffer of gradients. sent: the one they travel in. slice: that of their
        reduced sum.
    early, complete_early: whether its first gradient, or all of them, come before those of the blocks, as a
        head's do.
    held: bytes of gradients that autograd keeps from before those of the blocks until after them, as for a
        head that is tied to the embedding: the embedding's gradient is yet to be added.
    adding: bytes that autograd holds at once as it adds up the gradients of the largest parameter with
        several uses: two, and their sum. begun: whether another parameter's gradient has come by then.
    kernel: whether a kernel steps it. moments: values in `wide` that an optimizer without a kernel keeps per
        element besides the master. whole: of parameters that are stepped whole; None where slices are.
    stays: whether the room of its reduced slice stays from step to step.
    """

    numel: int
    shard_numel: int
    ranks: int
    dtype: torch.dtype
    given: torch.dtype
    gathered: torch.dtype
    coded: bool
    own_codes: bool
    trainable: bool
    resident: bool
    reduced: torch.dtype
    sent: torch.dtype
    slice: torch.dtype
    early: bool
    complete_early: bool
    held: int
    adding: int
    begun: bool
    placement: Placement
    kernel: bool
    moments: float
    whole: Stepped | None
    stays: bool

    @property
    def sharded(self) -> bool:
        return self.shard_numel < self.numel

    @property
    def reduced_in_place(self) -> bool:
        """Whether its reduced gradient is the whole buffer itself."""
        return not self.sharded and self.sent is self.slice

    @property
    def room(self) -> int:
        """Bytes of the device that its gradients keep between steps."""
        if not (self.stays and self.placement.gradients.near):
            return 0
        return self.gradient_bytes if self.reduced_in_place else self.slice_bytes

    @property
    def whole_bytes(self) -> int:
        """Bytes of the buffer that is computed with."""
        return self.numel * (1 if self.own_codes else self.gathered.itemsize)

    @property
    def own_bytes(self) -> int:
        """Bytes of the whole buffer in the parameters' own dtype."""
        return self.numel * self.dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        return self.shard_numel * self.dtype.itemsize

    @property
    def travel_bytes(self) -> int:
        """Bytes that a gather moves, of the whole buffer."""
        return Quantised.nbytes_of(self.numel) if self.coded else self.whole_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the whole buffer of gradients."""
        return self.numel * self.reduced.itemsize

    @property
    def sent_bytes(self) -> int:
        """Bytes of the whole buffer of gradients as it travels."""
        return self.numel * self.sent.itemsize

    @property
    def slice_bytes(self) -> int:
        """Bytes of the reduced sum that is left of the gradients, from backward to step."""
        return self.shard_numel * self.slice.itemsize

    @property
    def wide(self) -> torch.dtype:
        """The dtype that steps are computed in: of masters, but for split ones."""
        return at_least_fp32(self.dtype)

    def is_master(self, tier: Tier) -> bool:
        """Whether the shard itself is the master of a record in `tier`."""
        return self.placement.shard_serves(self.dtype.itemsize, tier)

    @property
    def before_steps(self) -> PlannedGroup:
        """The group before its first step, in which torch's optimizers make their state."""
        whole = self.whole and replace(self.whole, state=0)
        return replace(self, stays=False, moments=0, whole=whole)

    def record_bytes(self, numel: int, tier: Tier) -> int:
        """Bytes of master and moments, for `numel` elements in `tier`."""
        columns = self.placement.moments if self.is_master(tier) else self.placement.columns
        others = math.ceil(numel * self.moments) if self.whole is None else self.whole.state
        return tier.nbytes(numel, *columns) + self.wide.itemsize * others


@dataclass(frozen=True)
class PlannedUnit:
    """A unit as numbers.

    name: as the engine has it.
    parameters: elements, without padding.
    largest: bytes of the gradient of its largest trainable parameter.
    last: with one rank, bytes of the gradient of a group that came last, which autograd still holds while the
        group is reduced; the largest of all its groups. 0 with several ranks.
    reached: whether a backward comes to it: a parameter in it is trained, or one that is used before it.
    """

    name: str
    groups: tuple[PlannedGroup, ...]
    parameters: int
    largest: int
    last: int
    reached: bool

    @property
    def is_root(self) -> bool:
        """Whether it is there around all the others."""
        return self.name in (ROOT, PERSISTENT)

    @property
    def gathered(self) -> tuple[PlannedGroup, ...]:
        """Groups that are whole only while they are used."""
        return tuple(group for group in self.groups if not group.resident)

    def contains(self, other: PlannedUnit) -> bool:
        """Whether `other` runs inside its forward."""
        return self.name == ROOT or other.name.startswith(f"{self.name}.")


class UnitPlanner:
    """Plans the units of drafts. autocast: dtype that forwards run under, None for none. moments: values that
    optimizers keep per element of each parameter."""

    def __init__(
        self,
        model: nn.Module,
        drafts: Sequence[UnitDraft],
        config: Config,
        policy: GradientPolicy,
        autocast: Dtype,
        moments: Mapping[nn.Parameter, float],
    ) -> None:
        self._order = _Order.of(model, drafts)
        self._policy = policy
        self._sliced = config.stage > 0
        self._autocast = autocast
        self._moments = moments
        loads: dict[_Ranks, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for group in (group for draft in drafts for group in draft.groups):
            for (_, p), rank in zip(group.named, group.stepped_by or (), strict=False):
                loads[_stepping_ranks(group)][rank] += _stepped_numel(group, p) * (IN_A_STEP + moments[p])
        self._busiest = {ranks: max(load, key=lambda rank: load[rank]) for ranks, load in loads.items()}

    def unit(self, draft: UnitDraft) -> PlannedUnit:
        """A unit with the groups of its draft, in their order."""
        groups = [self._group(group, draft.is_resident) for group in draft.groups]
        place = {parameter: index for index, (_, parameter) in enumerate(draft.plan.parameters)}
        sizes = [
            (group.ranks, {place[p]: local_of(p).numel() * group.gathered.itemsize for _, p in drafted.named})
            for group, drafted in zip(groups, draft.groups, strict=True)
            if group.trainable
        ]
        alone = [of_group for ranks, of_group in sizes if ranks == 1]
        return PlannedUnit(
            draft.plan.name,
            tuple(groups),
            parameters=sum(local_of(parameter).numel() for parameter in place),
            largest=max((nbytes for _, of_group in sizes for nbytes in of_group.values()), default=0),
            last=max((of_group[min(of_group)] for of_group in alone), default=0),
            reached=self._order.is_reached(draft),
        )

    def _group(self, draft: GroupDraft, resident: bool) -> PlannedGroup:
        kind, policy, order = draft.kind, self._policy, self._order
        fmt = (
            EXACT
            if resident
            else kind.gather_options.gather_format(
                GatherFormat(self._autocast, kind.gather_options.quant_dtype), kind.dtype
            )
        )
        parameters = [parameter for _, parameter in draft.named]
        given = max((parameter.dtype for parameter in parameters), key=lambda dtype: dtype.itemsize)
        gathered = fmt.dtype or kind.dtype
        reduced = policy.whole_dtype(gathered, policy.sums)
        stored = draft.placement.gradients.stored
        tied = order.largest_tied(parameters)
        return PlannedGroup(
            numel=draft.layout.numel,
            shard_numel=draft.layout.shard_numel,
            ranks=draft.shared_by,
            dtype=kind.dtype,
            given=given if kind.trainable and given.itemsize > kind.dtype.itemsize else kind.dtype,
            gathered=gathered,
            coded=fmt.quant_dtype is not None and not kind.gather_options.own,
            own_codes=fmt.quant_dtype is not None and kind.gather_options.own,
            trainable=kind.trainable,
            resident=resident,
            reduced=reduced,
            sent=policy.reduce_dtype or reduced,
            slice=policy.place_dtype(gathered) if stored else policy.slice_dtype(gathered),
            early=any(map(order.is_early, parameters)),
            complete_early=draft.shared_by == 1 and all(map(order.is_early, parameters)),
            held=sum(local_of(p).numel() for p in parameters if order.is_held(p)) * gathered.itemsize,
            adding=0 if tied is None else IN_A_SUM * local_of(tied).numel() * gathered.itemsize,
            begun=tied is not None and any(order.first[p] > order.first[tied] for p in parameters),
            placement=draft.placement,
            kernel=kind.stepping.rule is not None,
            moments=self._moments_of(draft),
            whole=self._stepped(draft),
            stays=kind.trainable
            and policy.stays
            and (not policy.sums or policy.slice_dtype(gathered) is reduced),
        )

    def _moments_of(self, draft: GroupDraft) -> float:
        """Values that are kept besides records, per element of the group. Optimizers without a kernel keep
        them only for the parameters that they have; kernels keep what is in records."""
        if draft.kind.stepping.rule is not None or not draft.kind.trainable:
            return 0
        kept = [
            (local_of(parameter).numel(), self._moments.get(parameter, 0)) for _, parameter in draft.named
        ]
        if self._shards(draft) > 1:
            return max(each for _, each in kept)
        return sum(numel * each for numel, each in kept) / max(draft.layout.shard_numel, 1)

    def _shards(self, draft: GroupDraft) -> int:
        """Slices that a buffer is cut in."""
        return draft.shared_by if self._sliced else 1

    def _stepped(self, draft: GroupDraft) -> Stepped | None:
        if draft.stepped_by is None:
            return None
        busiest = self._busiest[_stepping_ranks(draft)]
        parameters = [parameter for _, parameter in draft.named]
        mine = [p for p, rank in zip(parameters, draft.stepped_by, strict=True) if rank == busiest]
        state = sum(math.ceil(_stepped_numel(draft, p) * self._moments[p]) for p in mine)
        each, every = ([_stepped_numel(draft, p) for p in some] for some in (mine, parameters))
        joins = bool(draft.kind.stepping.across)
        ranks = self._shards(draft) * (blocks_of(parameters[0]) if joins else 1)
        several = joins and self._shards(draft) > 1
        scattered = max((local_of(p).numel() for p in mine), default=0) if several else 0
        return Stepped(sum(each), state, sum(every), ranks, joins, scattered)


def _stepped_numel(draft: GroupDraft, parameter: nn.Parameter) -> int:
    """Elements of a parameter that is stepped whole."""
    return (parameter if draft.kind.stepping.across else local_of(parameter)).numel()


_Ranks = tuple[Tier, frozenset[str], frozenset[str]]


def _stepping_ranks(draft: GroupDraft) -> _Ranks:
    """What tells which ranks step a group that is stepped whole, each with a number among these: and the tier
    of its one record."""
    return draft.placement.optimizer[0][1], draft.kind.apart, draft.kind.stepping.across


@dataclass(frozen=True)
class _Order:
    """In what order a forward uses parameters, as far as the order of their names tells; a backward has their
    gradients the other way round.

    first, last: the places where a parameter is used first and last, which differ if it has several names.
    blocks: where the first block begins. trained: the place of the first parameter that is trained.
    """

    first: Mapping[nn.Parameter, int]
    last: Mapping[nn.Parameter, int]
    blocks: int
    trained: int

    @classmethod
    def of(cls, model: nn.Module, drafts: Sequence[UnitDraft]) -> _Order:
        inner, named = inner_leaves(model), model.named_parameters(remove_duplicate=False)
        uses = [
            (each, place)
            for place, (_, p) in enumerate(named)
            for each in (p, *map(as_parameter, inner.get(p, {}).values()))
        ]
        first, last = dict(reversed(uses)), dict(uses)
        blocks = [draft for draft in drafts if draft.plan.name not in (ROOT, PERSISTENT)]
        return cls(
            first,
            last,
            blocks=min((first[p] for draft in blocks for _, p in draft.plan.parameters), default=0),
            trained=min((place for p, place in first.items() if p.requires_grad), default=len(uses)),
        )

    def is_early(self, parameter: nn.Parameter) -> bool:
        """Whether all its uses come after the blocks', so that its gradient is complete before theirs."""
        return self.first[parameter] >= self.blocks

    def is_held(self, parameter: nn.Parameter) -> bool:
        """Whether it has uses on both sides of the blocks."""
        return self.first[parameter] < self.blocks <= self.last[parameter]

    def is_reached(self, draft: UnitDraft) -> bool:
        """Whether the unit's output depends on a parameter that is trained."""
        if draft.plan.name in (ROOT, PERSISTENT):
            return True
        within = (self.last[p] for hooked in draft.plan.hooked_modules for p in hooked.parameters())
        return max(within) >= self.trained

    def largest_tied(self, parameters: Sequence[nn.Parameter]) -> nn.Parameter | None:
        """The largest of those that are used more than once; None for none."""
        tied = (p for p in parameters if self.first[p] < self.last[p])
        return max(tied, key=lambda parameter: local_of(parameter).numel(), default=None)
