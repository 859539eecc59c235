"""What `initialize` refuses, before it touches anything."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelz import Accelerator, KeptBuffer
from zero.communication.communicator import Communicator
from zero.config.training import DTYPES, Config, dtype_named
from zero.deferred import deferred_init
from zero.drafts.preparation import Prepared
from zero.drafts.spans import span_of
from zero.errors import ConfigError, ModelError, some
from zero.optimizer.joint import kinds_of_groups, members
from zero.optimizer.stepping import of_param_groups
from zero.sharding.distributed import (
    divided_along,
    is_distributed,
    local_of,
    reaches,
    region_of,
    trained_inside,
)
from zero.sharding.forms import (
    as_parameter,
    descriptions,
    has_own_dispatch,
    inner_leaves,
    is_apart,
    name_of,
    named_leaves,
)
from zero.sharding.guard import LOST, NAME_ATTRIBUTE, REASON_ATTRIBUTE, ShardedParameter
from zero.sharding.local import apart_of
from zero.warning import warn

META = torch.device("meta")
RANGES = "ZERO_RANGES"
"""The variable that asks for ranges in the vendor's profiler."""


def check_model(model: nn.Module, device: torch.device) -> None:
    """Raise ModelError if the model cannot be sharded on a device. Changes nothing.

    On the meta device, for plans and tests of large meshes, a model need not have values.
    """
    shapes_only = device == META
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise ModelError(
            f"the model is wrapped in {type(model).__name__}, which would reduce all gradients a second "
            "time; pass the model itself (model.module)"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise ModelError(
                f"module {name!r} is TorchScript, whose parameters cannot be gathered for its forward: "
                "remove torch.jit, and let Config(compile=...) compile the model"
            )
    named = list(model.named_parameters())
    if not named:
        raise ModelError("the model has no parameters")
    for name, parameter in named:
        _check_parameter(name, parameter, shapes_only)
        _check_block(name, parameter)
    inner, again = inner_leaves(model), inner_leaves(model)
    for name, parameter in named:
        if parameter in inner:
            _check_form(name, parameter, inner[parameter], again[parameter])
        for suffix, leaf in inner.get(parameter, {"": parameter}).items():
            _check_leaf(name_of(name, suffix), local_of(as_parameter(leaf)))
        if parameter in inner and parameter.requires_grad:
            raise ModelError(f"parameter {name!r} is a {type(parameter).__name__}{_TRAINED}")
    leaves = {leaf: name for name, leaf in named_leaves(model)}
    _check_overlaps([(name, local_of(leaf)) for leaf, name in leaves.items()])
    for name, buffer in () if shapes_only else model.named_buffers():
        _check_buffer(name, buffer)


def check_process_group(group: object) -> None:
    """Raise ConfigError unless `group` is None or a process group that this rank is in."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            "this rank is not in the process_group: only the group's ranks call zero.initialize with it"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group must be a group of torch.distributed, got {type(group).__name__}; of a device "
            'mesh, pass one dimension: mesh.get_group("dp")'
        )
    if group is not None and list(ranks := _ranks_of(group)) != sorted(ranks):
        raise ConfigError(
            f"the process_group's ranks are {ranks}: an engine numbers its ranks in ascending order; make "
            "the group without sort_ranks=False"
        )


def _ranks_of(group: dist.ProcessGroup) -> list[int]:
    try:
        return dist.get_process_group_ranks(group)
    except KeyError as error:
        raise ConfigError("the process_group has been destroyed: make another one") from error


def check_dtypes(prepared: Prepared, config: Config, accelerator: Accelerator) -> None:
    """Raise ConfigError if the device lacks a dtype that training would use.

    Frozen parameters that are exact are only moved, as bytes.
    """
    parameters = [p for plan in prepared.plans for _, p in plan.parameters if p.is_floating_point()]
    dtype = dtype_named(config.precision)
    wanted = {p.dtype for p in parameters if p.requires_grad and (p in prepared.exact or not dtype)}
    wanted |= {dtype or p.dtype for p in parameters if p not in prepared.exact}
    if config.reduce_dtype:
        wanted.add(DTYPES[config.reduce_dtype])
    missing = wanted - accelerator.capabilities.dtypes
    if missing:
        have = ", ".join(sorted(str(d) for d in accelerator.capabilities.dtypes))
        named = [pair for plan in prepared.plans for pair in plan.parameters]
        trained = [name for name, p in named if p.requires_grad and p.dtype in missing]
        of = f", as {some(trained)} would be trained in" if trained else ""
        raise ConfigError(
            f"the device {accelerator.name!r} does not support {', '.join(str(d) for d in missing)} "
            f"(it has {have}){of}; choose another precision, "
            "or name frozen parameters that are only unpacked in exact_parameters"
        )


def check_compilation(config: Config, accelerator: Accelerator) -> None:
    """Raise ConfigError if the device cannot do what `config.compile` asks torch.compile for."""
    have = accelerator.capabilities.compile
    if config.compile is None or accelerator.capabilities.compiles(config.compile.inner):
        return
    do = 'use Config(compile=zero.Compile(inner="aot_eager"))' if have != "none" else "leave out compile"
    raise ConfigError(
        f"the device {accelerator.name!r} has no {config.compile.inner} (its backend declares "
        f"compile={have!r}); {do}"
    )


def check_capture(config: Config, accelerator: Accelerator) -> None:
    """Raise ConfigError if the device cannot capture what `config` asks for."""
    wanted = {
        "capture_step": config.capture_step,
        "graphs": config.compile is not None and config.compile.graphs,
    }
    asked = [name for name, is_wanted in wanted.items() if is_wanted]
    if asked and not accelerator.capabilities.graph_capture:
        raise ConfigError(
            f"{asked[0]}: the device {accelerator.name!r} captures no graphs (its backend does not declare "
            f"graph_capture); leave out {' and '.join(asked)}"
        )


def profiler_range(accelerator: Accelerator) -> Callable[[str], AbstractContextManager[None]] | None:
    """Return what shows ranges in the vendor's profiler, if ZERO_RANGES asks for it.

    Raises ConfigError if the device has nothing that does, or the variable is neither 1 nor 0.
    """
    asked = os.environ.get(RANGES) or "0"
    if asked not in ("0", "1"):
        raise ConfigError(f"{RANGES} is {asked!r}: set it to 1, or leave it out")
    if asked == "1" and not accelerator.capabilities.profiler_ranges:
        raise ConfigError(
            f"{RANGES}=1 asks for ranges in the profiler of the device's vendor, and the backend of "
            f"{accelerator.name!r} does not declare profiler_ranges: leave it out, and use torch.profiler, "
            "which shows the ranges on every device"
        )
    return accelerator.profiler_range if asked == "1" else None


def check_flat_buffers(accelerator: Accelerator, rank: int) -> None:
    """Raise ConfigError if the device cannot drop the bytes of flat buffers and bring them back, unless its
    buffers say that they keep them.

    A device that does not declare storage_resize may have flat buffers of another kind, so it is tried, on
    one element. Warns of such as keep them. Changes nothing.
    """
    if accelerator.capabilities.storage_resize:
        return
    cannot = (
        f"the device {accelerator.name!r} does not declare storage_resize, and cannot drop the bytes of a "
        "flat buffer; its backend must bring flat buffers of its own, or accelz.CopyAndKeep"
    )
    try:
        buffer = accelerator.flat_buffers.flatten([], [], 1, torch.float32)
        buffer.release()
        released = not buffer.materialized
        buffer.materialize()
    except RuntimeError as error:
        raise ConfigError(f"{cannot}: {error}") from error
    if not (released and buffer.materialized):
        raise ConfigError(cannot)
    if isinstance(buffer, KeptBuffer):
        warn(
            f"the device {accelerator.name!r} does not declare storage_resize: whole parameters and "
            "gradients keep their memory on each rank, at every stage; only optimizer states are sharded",
            rank=rank,
        )


def check_movable(model: nn.Module, device: torch.device) -> None:
    """Raise ModelError if a parameter on the host cannot move to the device and keep its identity.

    That concerns devices for which torch cannot replace a host Parameter's data by a device tensor. Changes
    nothing.
    """
    there = torch.empty(0, device=device)
    apart = [parameter for parameter, leaves in inner_leaves(model).items() if is_apart(parameter, leaves)]
    for parameter in (*apart, *(p for p in model.parameters() if trained_inside(p) is not None)):
        if parameter.device.type != device.type:
            raise ModelError(
                f"a parameter of class {type(parameter).__name__} is on {parameter.device}, and only its own "
                f"class can move it: call model.to({device.type!r}) before zero.initialize"
            )
    for name, leaf in named_leaves(model):
        parameter = local_of(leaf)
        if is_distributed(leaf) and parameter.device.type != device.type:
            raise ModelError(
                f"parameter {name!r} is a DTensor on {parameter.device}: use a mesh of {device.type!r}"
            )
        if deferred_init.is_deferred(parameter) or torch._has_compatible_shallow_copy_type(parameter, there):
            continue
        first = f"call model.to({device.type!r}) before creating the optimizer"
        cannot = f"parameter {name!r} cannot move to {device.type!r}"
        if weakref.getweakrefcount(parameter):
            raise ModelError(f"{cannot}: there are weak references to it, as in torch.nn.LSTM; {first}")
        if _is_in_graph(parameter):
            raise ModelError(
                f"{cannot}: it is part of an autograd graph; free what was computed with it, or {first}"
            )


def check_distributed(
    model: nn.Module, config: Config, data: Collection[int], dims: Collection[str] | None
) -> None:
    """Raise ModelError for a DTensor that is spread over ranks whose gradients the engine sums, unless it is
    declared to differ there, as experts do.

    data: the numbers of these among all ranks that were started. dims: the names of the dimensions of the
    job's mesh; None if there is none.
    """
    for name, parameter in model.named_parameters():
        if not is_distributed(parameter):
            continue
        reached = reaches(parameter, set(data))
        own = apart_of(name, config) & set(divided_along(parameter))
        if reached is not None and not (reached and own.issuperset(reached)):
            raise ModelError(
                f"parameter {name!r} is a DTensor over ranks with different data, which zero itself shards "
                "parameters over: remove fully_shard, or give zero.initialize a mesh whose data_dims are "
                f"others, or process_group=mesh.get_group(...). {_along_data(name, parameter, reached)}"
            )
        unknown = [dim for dim in divided_along(parameter) if dims is not None and dim not in dims]
        if unknown:
            raise ModelError(
                f"parameter {name!r} is a DTensor that is divided along {some(unknown)}, which is no "
                f"dimension of the mesh given to zero.initialize, which has {some(sorted(dims or ()))}"
            )
        if any(placement.is_partial() for placement in parameter.placements):  # type: ignore[attr-defined]
            raise ModelError(f"parameter {name!r} is a DTensor of partial sums: redistribute it first")
        _check_cut(name, parameter)


def _check_cut(name: str, parameter: nn.Parameter) -> None:
    is_here = parameter.device_mesh.get_coordinate() is not None  # type: ignore[attr-defined]
    region, shape = region_of(parameter) if is_here else None, tuple(local_of(parameter).shape)
    if region is not None and region.shape != shape:
        raise ModelError(
            f"parameter {name!r} is a DTensor of shape {tuple(parameter.shape)} whose block on this rank has "
            f"shape {shape}, where torch cuts {region.shape}: cut it as torch does, with distribute_tensor"
        )


def _along_data(name: str, parameter: nn.Parameter, reached: Collection[str]) -> str:
    """What else helps with a DTensor whose mesh has dimensions `reached` with different data."""
    if len(reached) == 1 and set(reached).issubset(divided_along(parameter)):
        (dim,) = reached
        return f"Experts of each rank's own are declared: Config(local_modules={{{name!r}: {dim!r}}})"
    along = f", {some(sorted(reached))}," if reached else ""
    return f'Or parallelize over the dimensions without those of the data{along} only, as over mesh["tp"]'


def _is_in_graph(parameter: nn.Parameter) -> bool:
    """Return whether C++ code holds the parameter, other than the node that accumulates its gradient."""

    def holders() -> int:
        return int(parameter._use_count()) - 1  # type: ignore[attr-defined]

    if holders() != 1 or not parameter.requires_grad:
        return holders() > 0
    node = torch.autograd.graph.get_gradient_edge(parameter).node  # made now, if there was none
    return holders() > 1 or node is None


_TRAINED = (
    ", of which the inner tensors cannot be trained by themselves: freeze it, requires_grad_(False), and "
    "train adapters beside it, or convert it to a plain parameter before zero.initialize"
)
_COMPARED_ELSEWHERE = (
    "units",
    "exact_parameters",
    "autocast_modules",
    "whole_parameters",
    "offload",
    "compile",
)
"""Settings that are not compared themselves, because what they lead to is."""


def check_equal(model: nn.Module, prepared: Prepared, config: Config, communicator: Communicator) -> None:
    """Raise RankMismatchError if ranks have different settings, models, optimizers or tiers.

    Collective. Changes nothing.
    """
    told = {
        f"Config({name}=...)": repr(getattr(config, name))
        for name in Config.model_fields
        if name not in (*_COMPARED_ELSEWHERE, "timeout")
    }
    offload = config.offload.model_dump_json(exclude={"path"})  # of which each rank may have its own
    told["Config(offload=...)"] = offload
    told["Config(compile=...)"] = str(config.compile and config.compile.model_dump_json())
    of_model = {
        "the model": _layout(model, prepared),
        "the optimizer, or Config(whole_parameters=...)": how_stepped(prepared.optimizer, config),
    }
    if not communicator.divided:
        communicator.check_equal(told | of_model, {"the model": _OF_RANKS})
    else:
        grid = communicator.grid
        communicator.check_equal_along(grid.names, told)
        check_count(prepared.optimizer, communicator)
        communicator.check_equal_along(
            grid.alike, of_model, {"the model": _OF_RANKS + _OF_STAGES.format(min(grid.others))}
        )
    _check_declared(prepared, config, communicator)


def check_count(optimizer: Optimizer, communicator: Communicator) -> None:
    """Raise RankMismatchError if ranks of a mesh have different numbers of optimizers. Collective."""
    count = {_COUNT: f"{len(members(optimizer))} optimizer(s)"}
    communicator.check_equal_along(communicator.grid.names, count, {_COUNT: _OF_COUNTS})


_OF_RANKS = (
    "Parameters that are each rank's own, such as experts, are declared with a dimension of a mesh: "
    "zero.initialize(..., mesh=mesh, data_dims=...) and zero.Config(local_modules={'blocks.*.experts': 'ep'})"
)
_DECLARED = "the shapes of what local_modules names"
_OF_DECLARED = (
    "Ranks that differ along other dimensions of the mesh only have the same of it, and so the same shapes"
)
_COUNT = "how many optimizers there are"
_OF_COUNTS = (
    "All ranks of a mesh step together: give each the same number of optimizers, and freeze what is not "
    "trained, requires_grad_(False), instead of leaving its optimizer out"
)
_OF_STAGES = "; models that differ altogether, as the stages of a pipeline do, with {{'*': {!r}}}"


def how_stepped(optimizer: Optimizer, config: Config) -> str:
    """Describe the optimizer, as text that is the same in every process."""
    ways = of_param_groups(optimizer, config)
    told = [(way.whole, way.rule and (way.rule.update.kernel)) for way in ways]
    return f"{kinds_of_groups(optimizer)} {told}"


def _layout(model: nn.Module, prepared: Prepared) -> str:
    """Describe, as text, what must be equal on all ranks about the model's units and parameters."""
    text = []
    told = descriptions(model)
    for plan in prepared.plans:
        text.append(f"unit {plan.name!r}")
        for name, parameter in plan.parameters:
            apart = sorted(prepared.apart.get(parameter, ()))
            form = "" if apart else told.get(parameter, "")
            text.append(
                f"{name} {_shape(parameter, apart)} {parameter.dtype} "
                f"requires_grad={parameter.requires_grad} "
                f"param_group={prepared.param_group_of.get(parameter)} "
                f"pretrained={deferred_init.promised(parameter)} cast={parameter in prepared.castable} "
                f"exact={parameter in prepared.exact} {form}"
            )
    return "\n".join(text)


def _shape(parameter: nn.Parameter, apart: Sequence[str]) -> str:
    """A parameter's shape, and how it is divided. apart: the mesh's dimensions along which it differs."""
    if is_distributed(parameter):
        placements = ", ".join(map(str, parameter.placements))  # type: ignore[attr-defined]
        return f"{tuple(parameter.shape)} as {placements}"
    return f"differs along {', '.join(apart)}" if apart else str(tuple(parameter.shape))


def _check_declared(prepared: Prepared, config: Config, communicator: Communicator) -> None:
    """Raise RankMismatchError if parameters that differ by rank have other shapes on ranks that have the same
    of them. Collective."""
    declared = {dim for _, dim in config.local_modules}
    if not declared:
        return
    every = (named for plan in prepared.plans for named in plan.parameters)
    shapes = "\n".join(f"{name} {tuple(p.shape)}" for name, p in every if prepared.apart.get(p))
    along = [dim for dim in communicator.grid.names if dim not in declared]
    communicator.check_equal_along(along, {_DECLARED: shapes}, {_DECLARED: _OF_DECLARED})


def _check_parameter(name: str, parameter: nn.Parameter, shapes_only: bool) -> None:
    if is_lazy(parameter):
        raise ModelError(f"parameter {name!r} is lazy and has no shape yet; run the model once first")
    if parameter.__dict__.get(REASON_ATTRIBUTE) == LOST:
        raise ModelError(f"this model can no longer be used: see parameter {name!r}, {LOST}")
    if isinstance(parameter, ShardedParameter) or NAME_ATTRIBUTE in parameter.__dict__:
        if not deferred_init.is_deferred(parameter):
            raise ModelError(
                f"parameter {name!r} already belongs to an engine, and still does when that is gone: build "
                "the model anew, and load engine.state_dict() or a checkpoint into it"
            )
        return
    if parameter.is_inference():
        raise ModelError(
            f"parameter {name!r} was made in torch.inference_mode(), so it cannot be trained, nor its values "
            "replaced: build the model outside of it; torch.no_grad() may stay"
        )
    if parameter.is_meta and not shapes_only:
        raise ModelError(
            f"parameter {name!r} is on the meta device and has no values; build the model under "
            "`with zero.init(config):` instead of torch.device('meta')"
        )
    if not shapes_only and _is_around_nothing(parameter):
        raise ModelError(
            f"parameter {name!r} is a {type(parameter).__name__} around a parameter of zero.init(), which "
            "has no values yet: convert the model inside the block, where such weights get values at once"
        )


def _is_around_nothing(parameter: Tensor) -> bool:
    """Whether a tensor wraps one that has no memory yet."""
    if is_distributed(parameter) or not is_traceable_wrapper_subclass(parameter):
        return False
    inner = [getattr(parameter, name) for name in parameter.__tensor_flatten__()[0]]
    plain = [each for each in inner if not is_traceable_wrapper_subclass(each)]
    return any(each.numel() and not each.is_meta and not each.untyped_storage().nbytes() for each in plain)


def _check_block(name: str, parameter: nn.Parameter) -> None:
    """Raise ModelError for a DTensor of which a block has its values in other tensors."""
    block = local_of(parameter)
    if is_distributed(parameter) and is_traceable_wrapper_subclass(block):
        raise ModelError(
            f"parameter {name!r} is a DTensor around a {type(block).__name__}, whose scales and codes zero "
            "does not know to be of a block: quantise only layers that are not divided, or divide a model "
            "that is not quantised. Of layers that torchao trains in float8, let the weights be plain: "
            "enable_fsdp_float8_all_gather=False"
        )


def _check_form(name: str, parameter: nn.Parameter, leaves: Any, again: Any) -> None:
    """Raise ModelError unless what gives a parameter's inner tensors gives the same ones each time."""
    fits = isinstance(leaves, Mapping) and isinstance(again, Mapping) and leaves.keys() == again.keys()
    if not (fits and all(isinstance(leaf, Tensor) and again[key] is leaf for key, leaf in leaves.items())):
        raise ModelError(
            f"parameter {name!r}: what tells the inner tensors of a {type(parameter).__name__}, by "
            "__tensor_flatten__ or zero.register_form, has to give the same tensor objects each time, by "
            "name: keep them as attributes of the parameter"
        )


def _check_leaf(name: str, leaf: Tensor) -> None:
    if has_own_dispatch(type(leaf)) and not isinstance(leaf, ShardedParameter):
        raise ModelError(
            f"parameter {name!r} is a {type(leaf).__name__}, which answers torch's operations itself and "
            "does not say which tensors hold its values: give the class __tensor_flatten__, or name them by "
            "zero.register_form(type, function)"
        )
    if leaf.is_complex() or leaf.layout is not torch.strided:
        raise ModelError(
            f"parameter {name!r} is {leaf.dtype}, {leaf.layout}; only dense, real "
            "parameters can be sharded (view_as_real gives the real form of a complex one)"
        )


def _check_buffer(name: str, buffer: Tensor) -> None:
    if is_lazy(buffer):
        raise ModelError(f"buffer {name!r} is lazy and has no shape yet; run the model once first")
    if buffer.is_meta:
        raise ModelError(
            f"buffer {name!r} is on the meta device and has no values; build the model under "
            "`with zero.init(config):` instead of torch.device('meta')"
        )
    if has_own_dispatch(type(buffer)) and not is_distributed(buffer):
        raise ModelError(
            f"buffer {name!r} is a {type(buffer).__name__}, whose values are in other tensors: make it a "
            "frozen parameter, nn.Parameter(..., requires_grad=False), or register these as buffers"
        )
    if buffer.layout is not torch.strided or buffer.is_nested:
        kind = "nested" if buffer.is_nested else buffer.layout
        raise ModelError(
            f"buffer {name!r} is {kind}, so it has no single block of memory to send to other ranks; "
            "register its dense parts, such as indices() and values(), as buffers and assemble it in "
            "forward, or keep it in a plain attribute, separate on each rank"
        )


def _check_overlaps(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise ModelError for two Parameter objects over the same memory: flattening would separate them."""
    spans = []
    for name, parameter in named:
        if not (deferred_init.is_deferred(parameter) or parameter.is_meta):
            span = span_of(parameter)
            spans.extend([] if span is None else [(*span, name)])
    spans.sort()
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise ModelError(
                f"parameters {first!r} and {second!r} are different Parameter objects over the same memory; "
                "tie them by assigning one Parameter to both modules"
            )
