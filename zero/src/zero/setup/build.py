"""The parts of an engine, put together."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zero.checkpoint.checkpoints import Checkpoints
from zero.checkpoint.engine_state import EngineParts
from zero.checkpoint.storable import check_first_states
from zero.drafts.checks import check_count, how_stepped
from zero.drafts.preparation import Prepared, prepare
from zero.engine import Engine
from zero.errors import UsageError
from zero.gradients.factor import GradientFactor
from zero.gradients.group_gradients import GradientPolicy
from zero.gradients.loss_scale import LossScale
from zero.gradients.reducer import GradientReducer
from zero.gradients.skipped_steps import SkippedSteps
from zero.memory.balance import AutoPlacementPolicy
from zero.memory.memory_tracer import MemoryTracer
from zero.memory.placement_policy import StaticPlacementPolicy
from zero.optimizer.hyper_parameters import scheduled
from zero.optimizer.integrity import Integrity
from zero.optimizer.joint import joint, members
from zero.optimizer.pieces import ranks_with_blocks
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.optimizer.state_offload import StateOffload
from zero.optimizer.stepping import group_steppings, of_unknown, ways_of
from zero.optimizer.taken_over import let_go, take_over
from zero.setup.build_units import Site, regrouped
from zero.sharding.flat_group import FlatGroup
from zero.sharding.lifetime import weakly
from zero.sharding.moves import guard_moves
from zero.sharding.sharded_unit import ShardedUnit
from zero.tiers.stores import Stores
from zero.tiers.tier import wanted
from zero.training_pass.boundary import Boundary
from zero.training_pass.model_hooks import hook_model
from zero.training_pass.schedule import Schedule
from zero.training_pass.training_pass import TrainingPass
from zero.whole.full_parameters import FullParameters
from zero.whole.gathered import mark_parameters
from zero.whole.held_gradients import HeldGradients


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """A model once it is sharded, whatever steps it. calls: what its modules' calls went through before, see
    `Module.compile()`."""

    site: Site
    units: Sequence[ShardedUnit]
    calls: weakref.WeakKeyDictionary[nn.Module, Any]

    @property
    def trainable(self) -> list[FlatGroup]:
        return [group for unit in self.units for group in unit.groups if group.trainable]


def build_engine(model: nn.Module, sharded: Sharded, prepared: Prepared) -> Engine:
    """Make the parts of an engine, and the engine; collective."""
    engine = Engine(**_parts(model, sharded, prepared, None))
    _offer_no_sync(model, engine)
    return engine


def _offer_no_sync(model: nn.Module, engine: Engine) -> None:
    """Have `model.no_sync()` be the engine's, for loops that were written for DistributedDataParallel.

    Unless the model has one of its own. The model does not keep the engine alive; see `sharding.lifetime`.
    """
    known = weakref.ref(engine)

    def no_sync() -> AbstractContextManager[None]:
        if (alive := known()) is None:
            raise UsageError(
                "model.no_sync() is that of the model's engine, which no longer exists: keep what "
                "zero.initialize returned for as long as you train"
            )
        return alive.no_sync()

    if not hasattr(model, "no_sync"):
        model.__dict__["no_sync"] = no_sync


def _attach(engine: Engine, sharded: Sharded, optimizer: Optimizer | Sequence[Optimizer]) -> None:
    """Give an engine an optimizer, by making its parts anew; collective.

    Its units, too, if there is an optimizer, whose records they have, or if the new one steps any parameters
    in another way than groups were made for without one. Raises, before anything is changed, UsageError,
    OptimizerError, ConfigError, RankMismatchError if ranks have different optimizers, and OffloadError. After
    OutOfMemoryError or CommunicationError, the model must be built anew.
    """
    optimizer, model, site = joint(optimizer), engine.module, sharded.site
    before = members(engine.optimizer)
    if set(before) & set(members(optimizer)):
        raise UsageError(
            "attach(): the engine has this optimizer already; give it all of them at once, or new ones"
        )
    has_mesh = site.communicator.grid.told
    prepared = prepare(model, optimizer, site.config, for_graphs=True, has_mesh=has_mesh)
    check_first_states(optimizer, model, site.config, site.communicator)
    _check_same(sharded, prepared)
    drafted = {of_unknown({}, site.config)}
    if before or any(ways_of(group.parameters, prepared.stepping) - drafted for group in sharded.trainable):
        stores = Stores(site.stores.accelerator, site.config.offload, site.stores.transfers)
        site = replace(site, stores=stores)
        units = regrouped(model, prepared, site, engine._full_parameters)
        sharded = replace(sharded, site=site, units=units)
    steps, interrupted = engine.steps, engine._integrity.interrupted
    for each in before:
        let_go(each)
    Engine.__init__(engine, **_parts(model, sharded, prepared, engine._pass))
    engine._boundary.steps, engine._integrity.interrupted = steps, interrupted


def _check_same(sharded: Sharded, prepared: Prepared) -> None:
    """Raise RankMismatchError if ranks have different optimizers; collective."""
    optimizer, param_group_of = prepared.optimizer, prepared.param_group_of
    communicator = sharded.site.communicator
    named = (zip(group.names, group.parameters, strict=True) for group in sharded.trainable)
    told = {name: param_group_of[p] for pairs in named for name, p in pairs if p in param_group_of}
    if communicator.divided:
        check_count(optimizer, communicator)
    communicator.check_equal({"the optimizer": f"{how_stepped(optimizer, sharded.site.config)} {told}"})


def _parts(
    model: nn.Module, sharded: Sharded, prepared: Prepared, replaced: TrainingPass | None
) -> dict[str, Any]:
    """The parts of an engine, each of which knows those before it; collective.

    Parts hold no part above them, nor the model; see `sharding.lifetime`. replaced: the pass that reports
    went to before.
    """
    site, units, optimizer = sharded.site, sharded.units, prepared.optimizer
    config, stores, communicator = site.config, site.stores, site.communicator
    stepping = group_steppings(sharded.trainable, prepared.stepping, config)
    accelerator, device_type = stores.accelerator, stores.accelerator.device.type
    tracer = MemoryTracer(accelerator, units)
    loss_scale = LossScale.of(config, accelerator)
    skipped_steps = None if loss_scale is None else SkippedSteps(loss_scale, accelerator, communicator)
    factor = GradientFactor(config, communicator, loss_scale, accelerator)
    joined = [(group, way.across) for group, way in stepping.items() if way.across]
    communicator.make_parts(ranks_with_blocks(communicator, group, across) for group, across in joined)
    sharded_optimizer = ShardedOptimizer(
        optimizer, prepared.param_group_of, stores, communicator, stepping, tracer, config.capture_step
    )
    state_offload = StateOffload(units, sharded_optimizer, communicator)
    integrity = Integrity(model, units, sharded_optimizer, state_offload)
    full_parameters = FullParameters(model, tuple(units), communicator, site.meshes, integrity)
    mark_parameters(model, full_parameters)
    guard_moves(model)
    changes: dict[str, Any] = {}  # by the program, to gradients
    reducer = GradientReducer(
        units if members(optimizer) else (),
        stores,
        communicator,
        GradientPolicy.of(config, communicator.group.size),
        lambda: scheduled(optimizer) | changes,
        skipped_steps,
    )
    held_gradients = HeldGradients(reducer, factor, communicator, full_parameters, sharded_optimizer, changes)
    on_disk = wanted(config.offload, "params").stored
    training_pass = TrainingPass(
        module=model,
        config=config,
        device_type=device_type,
        communicator=communicator,
        units=units,
        schedule=Schedule(list(units), config.prefetch, stores.read_ahead if on_disk else None),
        integrity=integrity,
        streamed_state=sharded_optimizer.record_streamer,
        reducer=reducer,
        factor=factor,
        held_gradients=held_gradients,
        tracer=tracer,
    )
    if replaced is not None:
        replaced.unhook()
        for module in model.modules():
            module._compiled_call_impl = sharded.calls.get(module)
    hook_model(model, training_pass)
    compiled = None
    if config.compile is not None:
        from zero.compiled.model import CompiledModel  # imports the compiler, for seconds

        compiled = CompiledModel(model, stores, training_pass)
    tracer.follow(reducer, sharded_optimizer)
    stores.may_move(sharded_optimizer.record_streamer)
    placement = StaticPlacementPolicy(stores)
    if config.offload.measured:
        one_by_one = [] if compiled else [model, *(m for unit in units for m in unit.hooked_modules)]
        placement = auto = AutoPlacementPolicy(
            stores, units, communicator, tracer, sharded_optimizer, reducer, one_by_one
        )
        stores.may_move(auto)
        training_pass.failed_by_itself = weakly(auto.after_failure)
    parts = EngineParts(
        model,
        config,
        accelerator,
        communicator,
        site.meshes,
        tuple(units),
        sharded_optimizer,
        prepared.param_group_of,
        loss_scale,
        state_offload,
    )
    checkpoints = Checkpoints(parts)
    boundary = Boundary(
        communicator=communicator,
        stores=stores,
        integrity=integrity,
        training_pass=training_pass,
        reducer=reducer,
        held_gradients=held_gradients,
        loss_scale=loss_scale,
        skipped_steps=skipped_steps,
        optimizer=sharded_optimizer,
        full_parameters=full_parameters,
        placement=placement,
        compiled=compiled,
        tracer=tracer,
        check_state=checkpoints.check_state,
    )
    for each in {optimizer, *members(optimizer)}:
        take_over(each, boundary)
    return {
        "module": model,
        "optimizer": optimizer,
        "boundary": boundary,
        "checkpoints": checkpoints,
        "attach": partial(_attach, sharded=sharded),
    }
