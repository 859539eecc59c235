"""Parameters that are trained in a tensor inside them, which is what lies in the flat buffer.

Of a DTensor over dimensions that the engine does not shard over, that is its local tensor: this rank's block.
Of a wrapper around one tensor of its own shape and dtype, as torchao's for training in 8 bits are, it is that
tensor. The parameter around it keeps its identity, its shape and, of a DTensor, its placements.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from itertools import pairwise, product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelz import HOST
from zero.errors import some
from zero.files.boxes import Region, Run

INNER_ATTRIBUTE = "_zero_inner"
"""Key in the __dict__ of an engine's trained wrapper of the name of the tensor inside, and the tensor."""
_DIMENSIONS = "_zero_dimensions"
"""The attribute of a DTensor with the names of its mesh's dimensions in the job's mesh."""


def is_distributed(tensor: Any) -> bool:
    """Whether an object is a DTensor. Imports nothing: without the module, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(parameter: nn.Parameter) -> nn.Parameter:
    """The tensor that has a parameter's values on this rank: itself, or one inside."""
    if is_distributed(parameter):
        return cast(Any, parameter)._local_tensor  # type: ignore[no-any-return]
    inner = trained_inside(parameter)
    return parameter if inner is None else inner[1]


def trained_inside(parameter: nn.Parameter) -> tuple[str, nn.Parameter] | None:
    """The one tensor that a trained wrapper has all its values in, and its name there; None for others."""
    known: tuple[str, nn.Parameter] | None = parameter.__dict__.get(INNER_ATTRIBUTE)
    if known is not None or type(parameter) is nn.Parameter or not parameter.requires_grad:
        return known
    if is_distributed(parameter) or not is_traceable_wrapper_subclass(parameter):
        return None
    given: Any = parameter
    names = given.__tensor_flatten__()[0]
    inner = getattr(given, names[0])
    plain = len(names) == 1 and type(inner) in (Tensor, nn.Parameter) and inner.is_floating_point()
    alike = plain and _form(inner) == _form(given)
    return (names[0], inner) if alike else None


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def divided_along(parameter: nn.Parameter) -> tuple[str, ...]:
    """The names of the dimensions of the job's mesh along which ranks have other blocks of a parameter. Of
    its own mesh, where `name_dimensions` was not told of one; a number for a dimension without a name."""
    if not is_distributed(parameter):
        return ()
    mesh, placements = cast(Any, parameter).device_mesh, cast(Any, parameter).placements
    names = parameter.__dict__.get(_DIMENSIONS) or _names(mesh)
    return tuple(
        name
        for name, size, placement in zip(names, mesh.mesh.shape, placements, strict=True)
        if size > 1 and not placement.is_replicate()
    )


def name_dimensions(parameters: Iterable[nn.Parameter], lines: Mapping[frozenset[int], str] | None) -> None:
    """Give dimensions of DTensors' meshes the names that the job's mesh has for the same ranks.

    lines: these names, by the numbers of this process's ranks along each dimension among all ranks that were
    started; None if the job has no mesh. Dimensions with other ranks get names that no mesh has.
    """
    for parameter in parameters:
        if not is_distributed(parameter):
            continue
        parameter.__dict__.pop(_DIMENSIONS, None)
        if lines is not None:
            mesh = cast(Any, parameter).device_mesh
            ranks = [_ranks_along(mesh, dim) for dim in range(mesh.ndim)]
            parameter.__dict__[_DIMENSIONS] = tuple(
                lines.get(along) or f"{name} (ranks {some([str(rank) for rank in sorted(along)])})"
                for name, along in zip(_names(mesh), ranks, strict=True)
            )


def _names(mesh: Any) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))


def _ranks_along(mesh: Any, dim: int) -> frozenset[int]:
    """The ranks of a mesh that differ from this one in one dimension alone, and this one; none if this one is
    not in the mesh."""
    place: list[Any] = list(mesh.get_coordinate() or ())
    if not place:
        return frozenset()
    place[dim] = slice(None)
    return frozenset(mesh.mesh[tuple(place)].tolist())


def reaches(parameter: nn.Parameter, ranks: Set[int]) -> tuple[str, ...] | None:
    """The dimensions of a DTensor's mesh along which there are several of these ranks, this one among them;
    None if there are no others in its mesh."""
    mesh = cast(Any, parameter).device_mesh
    if len(ranks & set(mesh.mesh.flatten().tolist())) < 2:
        return None
    names = parameter.__dict__.get(_DIMENSIONS) or _names(mesh)
    return tuple(name for dim, name in enumerate(names) if len(ranks & _ranks_along(mesh, dim)) > 1)


def described(parameter: nn.Parameter) -> str:
    """Which block of which whole a DTensor's local tensor is."""
    given: Any = parameter
    placements = ", ".join(map(str, given.placements))
    return (
        f"block {tuple(given.device_mesh.get_coordinate())} of {tuple(given.device_mesh.mesh.shape)} of "
        f"{tuple(given.shape)}, {placements}"
    )


@torch.no_grad()
def local_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of a DTensor's local tensor. Collective over its mesh, where the gradient is laid out in
    another way: as partial sums, or whole."""
    if not is_distributed(gradient):
        return gradient
    found, wanted = cast(Any, gradient), cast(Any, parameter).placements
    if found.placements != wanted:
        found = found.redistribute(placements=wanted)
    local: Tensor = found.to_local()
    wait: Callable[[], Tensor] | None = getattr(local, "wait", None)  # what is still on its way
    return local if wait is None else wait()


def as_distributed(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """A DTensor like the parameter around other values of its block, which may be on another device."""
    if not is_distributed(parameter):
        return local
    given = cast(Any, parameter)._spec
    meta = given.tensor_meta._replace(dtype=local.dtype)
    spec = type(given)(given.mesh, given.placements, tensor_meta=meta)
    made: Tensor = sys.modules["torch.distributed.tensor"].DTensor(local, spec, requires_grad=False)
    return made


def whole_of(parameter: nn.Parameter, block: Tensor) -> Tensor:
    """A parameter's values, put together from the ranks' blocks. Collective over a DTensor's mesh."""
    made: Any = as_distributed(parameter, block)
    return made.full_tensor() if is_distributed(made) else block


def block_of(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """This rank's block of a whole tensor, or of a DTensor that is laid out as the parameter is."""
    if not is_distributed(parameter):
        return whole
    given: Any = parameter
    if is_distributed(whole):
        return cast(Tensor, cast(Any, whole)._local_tensor)
    return _split(given, whole, range(given.dim()), given.device_mesh.get_coordinate())


def region_of(parameter: nn.Parameter) -> Region | None:
    """This rank's block, as the indices of the whole parameter that it has; None if it has all."""
    if not divided_along(parameter):
        return None
    return _region_at(parameter, cast(Any, parameter).device_mesh.get_coordinate())


def blocks_of(parameter: nn.Parameter) -> int:
    """How many blocks a parameter is divided into."""
    if not is_distributed(parameter):
        return 1
    given: Any = parameter
    placed = zip(given.device_mesh.mesh.shape, given.placements, strict=True)
    return math.prod(size for size, placement in placed if not placement.is_replicate())


def regions_beside(parameter: nn.Parameter) -> dict[int, Region]:
    """The blocks of the ranks that differ from this one only in dimensions along which a DTensor is divided,
    by their numbers among all that were started."""
    given: Any = parameter
    mesh, mine = given.device_mesh, given.device_mesh.get_coordinate()
    placed = zip(mine, mesh.mesh.shape, given.placements, strict=True)
    along = [[at] if placement.is_replicate() else range(size) for at, size, placement in placed]
    return {int(mesh.mesh[place]): _region_at(parameter, place) for place in product(*along)}


def _region_at(parameter: Any, place: Sequence[int]) -> Region:
    return Region(tuple(_runs(parameter, dim, size, place) for dim, size in enumerate(parameter.shape)))


def _runs(parameter: Any, dim: int, size: int, place: Sequence[int]) -> tuple[Run, ...]:
    """The indices that the rank at a place of a DTensor's mesh has in one dimension."""
    shape = [-1 if each == dim else 1 for each in range(parameter.dim())]
    found = _split(parameter, torch.arange(size, device=HOST).view(shape), (dim,), place).flatten()
    ends = [0, *(torch.nonzero(found.diff() != 1).flatten() + 1).tolist(), len(found)]
    return tuple(Run(int(found[first]), end - first) for first, end in pairwise(ends) if end > first)


def _split(parameter: Any, whole: Tensor, dims: Collection[int], place: Sequence[int]) -> Tensor:
    """The block of a whole tensor, which is divided only in some dimensions, at a place of a DTensor's
    mesh."""
    for at, placement in enumerate(parameter.placements):
        if not placement.is_replicate() and placement.dim in dims:
            mesh = parameter.device_mesh
            parts = placement._split_tensor(whole, mesh.size(at), with_padding=False, contiguous=False)[0]
            whole = parts[place[at]]
    return whole


def follow_local(parameter: nn.Parameter) -> None:
    """Let a parameter have the dtype and the storage offset that its local tensor has got; it keeps its
    identity and its hooks."""
    local = local_of(parameter)
    if local is parameter:
        return
    given, is_block = cast(Any, parameter), is_distributed(parameter)
    if is_block:
        made = as_distributed(parameter, local)
    else:
        (name,), context = given.__tensor_flatten__()
        made = type(given).__tensor_unflatten__({name: local}, context, given.shape, given.stride())
    twin: Any = nn.Parameter(made, requires_grad=parameter.requires_grad)
    if is_block:
        twin._local_tensor = local
    twin.__dict__.update(parameter.__dict__)
    hooks, accumulated = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    del made
    torch.utils.swap_tensors(parameter, twin)
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks, accumulated
