"""Build sharded units from drafts, one unit after another; and anew, for an optimizer that steps parameters
in another way than their groups were made for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from zero.communication.communicator import Communicator
from zero.communication.mesh import Meshes
from zero.config.training import Config, dtype_named
from zero.deferred import deferred_init
from zero.drafts.preparation import Prepared
from zero.drafts.unit_drafts import GroupDraft, UnitDraft, draft_units, reserve_disk
from zero.optimizer.state_size import moments_of
from zero.setup.initial_values import InitialValues
from zero.sharding.distributed import local_of
from zero.sharding.flat_group import FlatGroup
from zero.sharding.guard import ANEW, NAME_ATTRIBUTE, REASON_ATTRIBUTE, abandon
from zero.sharding.sharded_unit import ShardedUnit
from zero.tiers.placement import Placer
from zero.tiers.room import OutOfMemoryError, room_for
from zero.tiers.stores import Stores
from zero.whole.full_parameters import FullParameters, view_of


@dataclass(frozen=True)
class Site:
    """What units are built on: settings, ranks, and where state lives. meshes: of groups."""

    config: Config
    communicator: Communicator
    meshes: Meshes
    stores: Stores


def build_units(
    drafts: Sequence[UnitDraft],
    site: Site,
    initial_values: InitialValues,
    before: Callable[[int], None] = lambda index: None,
) -> list[ShardedUnit]:
    """Flatten, broadcast the first rank's values and shard, one unit at a time.

    Old gradients are dropped: they are of this rank's data alone, and the first new ones would add to them.
    initial_values: told of what this rank had before. before: called before a unit is built, with its index.
    """
    built = []
    for index, draft in enumerate(drafts):
        before(index)
        built.append(_build_unit(index, draft, site, initial_values))
    return built


def draft_and_reserve(prepared: Prepared, site: Site) -> list[UnitDraft]:
    """Draft the units, and reserve the disk space of their state; collective. Changes no parameter.

    Raises OffloadError, on every rank, if any of them finds no space.
    """
    config, meshes = site.config, site.meshes
    budgeted = config.offload.budget("optimizer") is not None
    moments = moments_of(prepared.optimizer, dtype_named(config.precision)) if budgeted else {}
    placer = Placer(config.offload, site.stores.host)
    drafts = draft_units(prepared, config, placer, lambda apart: meshes.of(apart).shards.size, moments)
    placer.warn_of_shortfalls(site.communicator.group.rank)
    reserve_disk(drafts, config, site.stores, site.communicator)
    return drafts


def regrouped(
    model: nn.Module, prepared: Prepared, site: Site, full_parameters: FullParameters
) -> list[ShardedUnit]:
    """Build units whose groups are those that `zero.initialize` would make for another optimizer; collective.

    One unit at a time is whole, with its most precise values; state of the units that there are stays until
    the end. site: of the new ones. full_parameters: of the units that there are, which are used up.
    Raises OffloadError, before anything is changed, if a rank finds no space on its disk.
    """
    units, drafts = full_parameters.units, draft_and_reserve(prepared, site)
    full_parameters.take_in_frozen()
    full_parameters.begin_write()
    with taking_over(model):
        return build_units(
            drafts,
            site,
            InitialValues(model, site.communicator),  # of which nobody asks for differences: there are none
            before=lambda index: _make_whole(units[index], full_parameters),
        )


@contextmanager
def taking_over(model: nn.Module) -> Iterator[None]:
    """Wrap everything that changes parameters.

    Half-way through, some parameters have values only on other ranks, or none: after an error they raise
    whenever they are used.
    """
    try:
        yield
    except BaseException as error:
        abandon(model.named_parameters())
        if isinstance(error, OutOfMemoryError):
            raise OutOfMemoryError(f"{error}. The model is now incomplete: {ANEW}") from error
        raise


def _build_unit(index: int, draft: UnitDraft, site: Site, initial_values: InitialValues) -> ShardedUnit:
    plan, communicator = draft.plan, site.communicator
    awaited = all(deferred_init.promised(p) for _, p in plan.parameters)
    nbytes = sum(local_of(p).numel() * g.kind.dtype.itemsize for g in draft.groups for _, p in g.named)
    with room_for(site.stores.accelerator, "to shard", plan.name, nbytes):
        deferred_init.materialize(p for _, p in plan.parameters)
        groups = tuple(_flattened(group, plan.name, site) for group in draft.groups)
        if communicator.alike.size > 1 and not awaited:
            for flat in groups:
                _note(flat, initial_values)
                communicator.spread(plan.name, flat.home.data, flat.mesh)
        unit = ShardedUnit(index, plan, groups, communicator, draft.is_resident)
        unit.finalize_shards()
    for name, parameter in (*plan.parameters, *plan.wrappers):
        parameter.grad = None
        parameter.__dict__.pop(REASON_ATTRIBUTE, None)
        for each in (parameter, local_of(parameter)):
            each.__dict__[NAME_ATTRIBUTE] = name
    return unit


def _flattened(group: GroupDraft, unit: str, site: Site) -> FlatGroup:
    kind, mesh = group.kind, site.meshes.of(group.kind.apart)
    of_kind = kind.dtype, mesh, group.layout, kind.gather_options
    return FlatGroup(site.stores, group.placement, unit, group.named, *of_kind)


def _note(group: FlatGroup, initial_values: InitialValues) -> None:
    for name, parameter, slot in zip(group.names, group.parameters, group.layout.slots, strict=True):
        if not deferred_init.promised(parameter):
            values = group.home.data[slot.offset : slot.offset + slot.numel]
            initial_values.note(name, values, group.mesh.apart, parameter)


def _make_whole(unit: ShardedUnit, full_parameters: FullParameters) -> None:
    """Give a unit's parameters whole values in memory of their own, from the masters if there are any.
    Collective."""
    with full_parameters.communicator.together():
        wholes = [full_parameters.gather(unit, group, group.widest) for group in unit.groups]
    unit.guard.open()
    for group, whole in zip(unit.groups, wholes, strict=True):
        for index, local in enumerate(group.local):
            local.data = view_of(whole, group, index).clone()
