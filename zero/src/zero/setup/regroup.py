"""Units built anew, for an optimizer that steps parameters in another way than their groups were made for."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from zero.config.training import Config
from zero.drafts.preparation import prepare
from zero.setup.build_units import build_units, draft_and_reserve, taking_over
from zero.setup.initial_values import InitialValues
from zero.sharding.sharded_unit import ShardedUnit
from zero.tiers.stores import Stores
from zero.whole.full_parameters import FullParameters, view_of


def regrouped(
    model: nn.Module, optimizer: Optimizer, config: Config, stores: Stores, full_parameters: FullParameters
) -> list[ShardedUnit]:
    """Build units whose groups are those that `zero.initialize` would make for this optimizer; collective.

    One unit at a time is whole, with its most precise values; state of the units that there are stays until
    the end. stores: for the new groups. full_parameters: of the units that there are, which are used up.
    Raises OffloadError, before anything is changed, if a rank finds no space on its disk.
    """
    communicator, units = full_parameters.communicator, full_parameters.units
    grid = communicator.grid
    prepared = prepare(model, optimizer, config, for_graphs=True, dims=grid.names if grid.told else ())
    drafts = draft_and_reserve(prepared, config, communicator, full_parameters.meshes, stores)
    full_parameters.take_in_frozen()
    full_parameters.begin_write()
    with taking_over(model):
        return build_units(
            drafts,
            config,
            stores,
            communicator,
            full_parameters.meshes,
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
