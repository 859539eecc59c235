"""`zero.initialize`: everything is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

import accelz
from accelz import Accelerator
from zero.checkpoint.storable import check_first_states
from zero.communication.communicator import Communicator
from zero.communication.grid import Grid
from zero.communication.job import Arranged, JobGroups, join
from zero.communication.mesh import Meshes
from zero.config.training import Config, dtype_named
from zero.drafts.aliases import check_aliases
from zero.drafts.arrangement import arrangement
from zero.drafts.checks import (
    check_capture,
    check_compilation,
    check_distributed,
    check_dtypes,
    check_equal,
    check_flat_buffers,
    check_model,
    check_movable,
    profiler_range,
)
from zero.drafts.float8_layers import check_float8_layers
from zero.drafts.preparation import Prepared, prepare, settings, warn_of_nothing_to_move
from zero.engine import Engine
from zero.pretrained import keep_promises
from zero.ranges import show_by
from zero.setup.build import Sharded, build_engine
from zero.setup.build_units import Site, build_units, draft_and_reserve, taking_over
from zero.setup.initial_values import InitialValues
from zero.sharding.distributed import name_dimensions
from zero.sharding.exact import computes_in
from zero.sharding.forms import adopt, named_leaves
from zero.sharding.local import apart_of
from zero.sharding.parts import as_model
from zero.tiers.room import room_for
from zero.tiers.stores import Stores
from zero.tiers.values import lasting
from zero.warning import Held, held_back, warn
from zero.whole.full_parameters import spread_buffer


@lasting()
def initialize(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    config: Config | None = None,
    process_group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    data_dims: str | Sequence[str] | None = None,
    shard_dims: str | Sequence[str] | None = None,
) -> Engine:
    """Shard `model` and `optimizer` over the ranks of the job and return the engine that trains them.

    The job is given by torchrun's environment or an initialised default process group, and is otherwise one
    rank. The model may be on the host or on the device; every rank starts from rank 0's values, with a
    warning if ranks had built some modules with other values and others with the same. Both objects
    keep their identity, so schedulers and references to modules and parameters stay valid; the optimizer's
    param_groups then hold what this rank steps: its slices, or whole parameters (see
    Config.whole_parameters).

    model: the module, or a list of parts of one model that are called by themselves, as the stages of a
        pipeline are; their names begin with their numbers.
    optimizer: one optimizer, or a list of them for different parameters, such as Muon for matrices and AdamW
        for the rest. None: the model is only read, as a reference or a teacher is; or its optimizer is
        created later, from `model.parameters()`, and given to `engine.attach(optimizer)`.
    process_group: train on the ranks of this group of torch.distributed, such as one dimension of a device
        mesh; only they make this call. The engine knows no other ranks: wherever it speaks of the job or of
        every rank, that is this group, and rank numbers are those in it.
    mesh: a device mesh of torch's whose ranks are the job; only they make this call. Along its other
        dimensions than `data_dims` ranks have the same data: parts of one model (tensor parallelism), or
        models of their own, the stages of a pipeline, which `Config(local_modules={"*": "pp"})` declares.
        Gradients are averaged over the data's dimensions; norms, clipping and skipped steps are the job's.
        The engine's ranks and world size are those of the data.
    data_dims: the mesh's dimensions along which ranks have different data; a mesh of one dimension needs
        none.
    shard_dims: those of them that parameters are sharded over; along the others there are copies of the
        model. By default all.

    Raises, before anything is changed: ConfigError, ModelError or OptimizerError; RankMismatchError if ranks
    have different models, optimizers or settings; OffloadError if a rank finds no space on its disk. After
    OutOfMemoryError, CommunicationError, or CheckpointError (pretrained weights can no longer be read), model
    and optimizer must be built anew.
    """
    config, model = settings(config), as_model(model)
    arranged = arrangement(process_group, mesh, data_dims, shard_dims, config)
    accelerator = accelz.current()
    prepared, warnings = _examined(model, optimizer, config, accelerator, arranged, process_group)
    groups = join(accelerator, config.timeout, process_group, arranged)
    site = _site(model, prepared, config, accelerator, groups, warnings)
    drafts = draft_and_reserve(prepared, site)
    initial_values = InitialValues(model, site.communicator)
    _move_buffers(model, site, initial_values)
    with taking_over(model):
        adopt(model)
        accelz.unshare(dict.fromkeys(leaf for _, leaf in named_leaves(model)))
        units = build_units(drafts, site, initial_values)
        initial_values.warn_of_differences()
        keep_promises(units, site.communicator)
        calls = WeakKeyDictionary({module: module._compiled_call_impl for module in model.modules()})
        return build_engine(model, Sharded(site=site, units=units, calls=calls), prepared)


def _examined(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    config: Config,
    accelerator: Accelerator,
    arranged: Arranged | None,
    process_group: ProcessGroup | None,
) -> tuple[Prepared, Sequence[Held]]:
    """What this rank can find out by itself, and warnings, for when it has a number in the job."""
    check_model(model, accelerator.device)
    check_movable(model, accelerator.device)
    dims = None if arranged is None else arranged.grid.names
    lines = None if arranged is None else {arranged.along((dim,)): dim for dim in arranged.grid.names}
    name_dimensions(model.parameters(), lines)
    check_distributed(model, config, _data_ranks(arranged, process_group), dims)
    with held_back() as warnings:
        check_aliases(model)
        prepared = prepare(model, optimizer, config, for_graphs=True, has_mesh=arranged is not None)
    check_dtypes(prepared, config, accelerator)
    check_compilation(config, accelerator)
    check_capture(config, accelerator)
    show_by(profiler_range(accelerator))
    return prepared, warnings


def _site(
    model: nn.Module,
    prepared: Prepared,
    config: Config,
    accelerator: Accelerator,
    groups: JobGroups,
    warnings: Sequence[Held],
) -> Site:
    """What units are built on, once the ranks have found that they want the same; collective."""
    communicator = Communicator(accelerator, groups, type(model).__name__, config.outlive_launcher)
    rank = communicator.group.rank
    for message, category in warnings:
        warn(message, category, rank=rank)
    check_flat_buffers(accelerator, rank)
    check_float8_layers(model, accelerator)  # bound by now: which products there are depends on the chip
    check_equal(model, prepared, config, communicator)
    check_first_states(prepared.optimizer, model, config, communicator)
    grid = groups.grid if groups.grid.told else Grid.plain(groups.whole.size, config.shard_ranks)
    meshes = Meshes(groups, grid, partial(apart_of, config=config))
    differing = [*prepared.apart.values(), *(apart_of(name, config) for name, _ in model.named_buffers())]
    meshes.make(communicator.everywhere, differing)
    stores = Stores(accelerator, config.offload, communicator.observation.transfers)
    warn_of_nothing_to_move(config, accelerator.device, rank)
    return Site(config, communicator, meshes, stores)


def _data_ranks(arranged: Arranged | None, process_group: ProcessGroup | None) -> Collection[int]:
    """The numbers, among all ranks that were started, of those whose gradients are summed with this one's."""
    if not dist.is_initialized():
        return ()
    if arranged is None:
        return dist.get_process_group_ranks(process_group or dist.group.WORLD)
    return arranged.along(arranged.grid.data)


def _move_buffers(model: nn.Module, site: Site, initial_values: InitialValues) -> None:
    """Move buffers to the device, whole and with their first rank's values."""
    config, accelerator = site.config, site.stores.accelerator
    for module_name, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            casts = config.cast_buffers and computes_in(buffer.dtype)
            cast = dtype_named(config.precision) if casts else None
            what = f"buffer {module_name}.{name}"
            with room_for(accelerator, f"for {what}", None, buffer.nbytes):
                module._buffers[name] = moved = _writable(buffer.to(accelerator.device, cast))
                full_name = f"{module_name}.{name}".lstrip(".")
                spread_over = site.meshes.of_buffer(full_name)
                initial_values.note(full_name, moved, spread_over.apart)
                spread_buffer(site.communicator, what, moved, spread_over)


def _writable(buffer: Tensor) -> Tensor:
    """Return the buffer with memory for every element (expanded ones lack it) and no pending conjugation."""
    expanded = any(step == 0 and size > 1 for size, step in zip(buffer.shape, buffer.stride(), strict=True))
    plain = buffer.resolve_conj().resolve_neg()
    return plain.contiguous() if expanded else plain
