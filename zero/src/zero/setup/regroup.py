"""Units built anew, for an optimizer that steps parameters of one group in different ways."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from zero.config.training import Config, dtype_named
from zero.drafts.preparation import prepare
from zero.drafts.unit_drafts import draft_units, reserve_disk
from zero.optimizer.state_size import moments_of
from zero.setup.build_units import build_units, taking_over
from zero.setup.initial_values import InitialValues
from zero.sharding.sharded_unit import ShardedUnit
from zero.tiers.placement import Placer
from zero.tiers.stores import Stores
from zero.whole.full_parameters import FullParameters, view_of


def regrouped(
    model: nn.Module, optimizer: Optimizer, config: Config, stores: Stores, full_parameters: FullParameters
) -> list[ShardedUnit]:
    """Build units whose groups are those that `zero.initialize` would make for this optimizer; collective.

    One unit at a time is whole, with its most precise values; state of the units that there are stays until
    the end. stores: for the new groups. full_parameters: of
    the units that there are, which are used up. Raises OffloadError, before anything is changed, if a rank
    finds no space on its disk.
    """
    communicator, units = full_parameters.communicator, full_parameters.units
    grid = communicator.grid
    prepared = prepare(model, optimizer, config, for_graphs=True, dims=grid.names if grid.told else ())
    budgeted = config.offload.budget("optimizer") is not None
    moments = moments_of(optimizer, dtype_named(config.precision)) if budgeted else {}
    meshes, placer = full_parameters.meshes, Placer(config.offload, stores.host)
    drafts = draft_units(prepared, config, placer, lambda apart: meshes.of(apart).shards.size, moments)
    placer.warn_of_shortfalls(communicator.group.rank)
    reserve_disk(drafts, config, stores, communicator)
    full_parameters.take_in_frozen()
    full_parameters.begin_write()
    with taking_over(model):
        return build_units(
            drafts,
            config,
            stores,
            communicator,
            meshes,
            InitialValues(model, communicator),  # of which nobody asks for differences: there are none
            before=lambda index: _make_whole(units[index], full_parameters),
        )


def _make_whole(unit: ShardedUnit, full_parameters: FullParameters) -> None:
    """Give a unit's parameters whole values in memory of their own, from the masters if there are any.
    Collective."""
    with full_parameters.communicator.together():
        wholes = [full_parameters.gather(unit, group, group.widest) for group in unit.groups]
    unit.guard.open()
    for group, whole in zip(unit.groups, wholes, strict=True):
        for index, local in enumerate(group.local):
            local.data = view_of(whole, group, index).clone()
