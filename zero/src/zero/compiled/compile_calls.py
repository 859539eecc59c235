"""A model's compiled calls, put together from what an engine has.

Importing this module imports the compiler, which takes seconds, so only those who compile do so.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import nn

from zero.communication.communicator import Communicator
from zero.compiled.backend import ShardingBackend
from zero.compiled.facts import gather_facts
from zero.compiled.model import CompiledModel
from zero.compiled.persistence import Persistence
from zero.compiled.runtime import Runtime
from zero.config.training import Config
from zero.gradients.group_gradients import GradientPolicy
from zero.optimizer.record_streamer import RecordStreamer
from zero.sharding.lifetime import weakly
from zero.sharding.sharded_unit import ShardedUnit
from zero.tiers.stores import Stores
from zero.tiers.tier import wanted
from zero.training_pass.training_pass import TrainingPass


def compile_calls(
    module: nn.Module,
    config: Config,
    units: Sequence[ShardedUnit],
    stores: Stores,
    communicator: Communicator,
    record_streamer: RecordStreamer,
    training_pass: TrainingPass,
) -> CompiledModel:
    """Make calls of `module` run through torch.compile, as `config.compile` says."""
    settings = config.compile
    assert settings is not None
    on_disk = wanted(config.offload, "params").stored
    runtime = Runtime(units, stores.accelerator, training_pass, record_streamer)
    policy = GradientPolicy.of(config, communicator.group.size)
    facts = gather_facts(runtime.handle, units, record_streamer, policy)
    telling = weakly(communicator.telling)
    backend = ShardingBackend(facts, runtime.parameters, settings, _leaving(config, stores), telling)
    persistence = Persistence(runtime, stores.accelerator, communicator, settings.persist_budget)
    around = communicator.together if on_disk else nullcontext
    return CompiledModel(module, runtime, backend, persistence, training_pass, around, telling)


def _leaving(config: Config, stores: Stores) -> float:
    """The part of the activations that leaves the device, from 0 to 1."""
    leaves = not wanted(config.offload, "activations").on(stores.accelerator).near
    return config.offload.part("activations") if leaves else 0.0
