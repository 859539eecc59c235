"""`zero.initialize`: everything is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

import accelz
from zero.communication.communicator import Communicator
from zero.communication.job import join, mesh_of
from zero.config.training import Config, dtype_named
from zero.drafts.aliases import check_aliases
from zero.drafts.checks import (
    check_dtypes,
    check_equal,
    check_flat_buffers,
    check_model,
    check_movable,
    check_process_group,
)
from zero.drafts.offload_fit import warn_of_nothing_to_move
from zero.drafts.preparation import prepare, settings
from zero.drafts.unit_drafts import draft_units, reserve_disk
from zero.engine import Engine
from zero.optimizer.joint import members
from zero.optimizer.state_size import moments_of
from zero.optimizer.stepping import GroupStepping
from zero.pretrained import keep_promises
from zero.setup.build import Sharded, Stepper, build_engine
from zero.setup.build_units import build_units, taking_over
from zero.setup.initial_values import InitialValues
from zero.sharding.exact import computes_in
from zero.tiers.placement import Placer
from zero.tiers.room import room_for
from zero.tiers.stores import Stores
from zero.warning import held_back, warn
from zero.whole.full_parameters import spread_buffer


def initialize(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    config: Config | None = None,
    process_group: ProcessGroup | None = None,
) -> Engine:
    """Shard `model` and `optimizer` over the ranks of the job and return the engine that trains them.

    The job is given by torchrun's environment or an initialised default process group, and is otherwise one
    rank. The model may be on the host or on the device; every rank starts from rank 0's values, with a
    warning if ranks had built some modules with other values and others with the same. Both objects
    keep their identity, so schedulers and references to modules and parameters stay valid; the optimizer's
    param_groups then hold what this rank steps: its slices, or whole parameters (see
    Config.whole_parameters).

    optimizer: one optimizer, or a list of them for different parameters, such as Muon for matrices and AdamW
        for the rest. None: the model is only read, as a reference or a teacher is; or its optimizer is
        created later, from `model.parameters()`, and given to `engine.attach(optimizer)`.
    process_group: train on the ranks of this group of torch.distributed, such as one dimension of a device
        mesh; only they make this call. The engine knows no other ranks: wherever it speaks of the job or of
        every rank, that is this group, and rank numbers are those in it.

    Raises, before anything is changed: ConfigError, ModelError or OptimizerError; RankMismatchError if ranks
    have different models, optimizers or settings; OffloadError if a rank finds no space on its disk. After
    OutOfMemoryError, CommunicationError, or CheckpointError (pretrained weights can no longer be read), model
    and optimizer must be built anew.
    """
    config = settings(config)
    check_process_group(process_group)
    check_model(model)
    accelerator = accelz.current()
    check_movable(model, accelerator.device)
    with held_back() as held:
        check_aliases(model)
        prepared = prepare(model, optimizer, config, for_graphs=True)
    check_dtypes(prepared, config, accelerator)
    budgeted = config.offload.budget("optimizer") is not None
    moments = moments_of(prepared.optimizer, dtype_named(config.precision)) if budgeted else {}

    groups = join(accelerator, config.timeout, process_group)
    name, outlive = type(model).__name__, config.outlive_launcher
    communicator = Communicator(accelerator, groups, name, outlive)
    for message, category in held:
        warn(message, category, rank=communicator.group.rank)
    check_flat_buffers(accelerator)
    check_equal(prepared, config, communicator)
    mesh, stores = mesh_of(groups, config.shard_ranks), Stores(accelerator, config.offload)
    placer = Placer(config.offload, stores.host)
    drafts = draft_units(prepared, config, placer, mesh.shards.size, moments)
    placer.warn_of_shortfalls(communicator.group.rank)
    warn_of_nothing_to_move(config, accelerator.device, communicator.group.rank)
    reserve_disk(drafts, config, stores, communicator)
    initial_values = InitialValues(model, communicator)
    _move_buffers(model, config, accelerator, communicator, initial_values)
    with taking_over(model):
        accelz.unshare(model.parameters())
        units = build_units(drafts, config, stores, communicator, mesh, initial_values)
        initial_values.warn_of_differences()
        keep_promises(units, communicator)
        trains = bool(members(prepared.optimizer))
        stepper = Stepper(
            optimizer=prepared.optimizer,
            param_group_of=prepared.param_group_of,
            stepping={
                group: drafted.stepping if trains else GroupStepping(None)
                for unit, draft in zip(units, drafts, strict=True)
                for group, drafted in zip(unit.groups, draft.groups, strict=True)
            },
        )
        calls = WeakKeyDictionary({module: module._compiled_call_impl for module in model.modules()})
        sharded = Sharded(config=config, stores=stores, communicator=communicator, units=units, calls=calls)
        return build_engine(model, sharded, stepper)


def _move_buffers(
    model: nn.Module,
    config: Config,
    accelerator: accelz.Accelerator,
    communicator: Communicator,
    initial_values: InitialValues,
) -> None:
    """Move buffers to the device, whole and with rank 0's values."""
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            casts = config.cast_buffers and computes_in(buffer.dtype)
            cast = dtype_named(config.precision) if casts else None
            what = f"buffer {module_name}.{name}"
            with room_for(accelerator, f"for {what}", None, buffer.nbytes):
                module._buffers[name] = moved = _writable(buffer.to(accelerator.device, cast))
                initial_values.note(f"{module_name}.{name}".lstrip("."), moved)
                spread_buffer(communicator, what, moved)


def _writable(buffer: Tensor) -> Tensor:
    """Return the buffer with memory for every element (expanded ones lack it) and no pending conjugation."""
    expanded = any(step == 0 and size > 1 for size, step in zip(buffer.shape, buffer.stride(), strict=True))
    plain = buffer.resolve_conj().resolve_neg()
    return plain.contiguous() if expanded else plain
