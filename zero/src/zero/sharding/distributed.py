"""Parameters that are DTensors over dimensions that the engine does not shard over: their local tensors.

A rank's engine knows its own block of such a parameter, the local tensor, which is what lies in the flat
buffer. The parameter around it keeps its identity, its global shape and its placements.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from accelz import HOST
from zero.files.boxes import Region, Run


def is_distributed(tensor: Any) -> bool:
    """Whether an object is a DTensor. Imports nothing: without the module, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(parameter: nn.Parameter) -> nn.Parameter:
    """The tensor that has a parameter's values on this rank: itself, unless it is a DTensor."""
    return cast(Any, parameter)._local_tensor if is_distributed(parameter) else parameter


def divided_along(parameter: nn.Parameter) -> tuple[str, ...]:
    """The names of the dimensions of its mesh along which ranks have other blocks of a parameter; a number
    for a dimension without a name."""
    if not is_distributed(parameter):
        return ()
    mesh, placements = cast(Any, parameter).device_mesh, cast(Any, parameter).placements
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return tuple(
        name
        for name, size, placement in zip(names, mesh.mesh.shape, placements, strict=True)
        if size > 1 and not placement.is_replicate()
    )


def ranks_of(parameter: nn.Parameter) -> set[int]:
    """The numbers, among all ranks that were started, of those that a DTensor is spread over."""
    return {int(rank) for rank in cast(Any, parameter).device_mesh.mesh.flatten()}


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
    module, given = sys.modules["torch.distributed.tensor"], cast(Any, parameter)
    made: Tensor = module.DTensor(local, _spec(given, local.dtype), requires_grad=False)
    return made


def block_of(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """This rank's block of a whole tensor, or of a DTensor that is laid out as the parameter is."""
    if not is_distributed(parameter):
        return whole
    given: Any = parameter
    if is_distributed(whole):
        return cast(Tensor, cast(Any, whole)._local_tensor)
    return _split(given, whole, range(given.dim()))


def region_of(parameter: nn.Parameter) -> Region | None:
    """This rank's block, as the indices of the whole parameter that it has; None if it has all."""
    if not divided_along(parameter):
        return None
    return Region(tuple(_runs(parameter, dim, size) for dim, size in enumerate(parameter.shape)))


def _runs(parameter: Any, dim: int, size: int) -> tuple[Run, ...]:
    """The indices that this rank has in one dimension."""
    shape = [-1 if each == dim else 1 for each in range(parameter.dim())]
    found = _split(parameter, torch.arange(size, device=HOST).view(shape), (dim,)).flatten()
    ends = [0, *(torch.nonzero(found.diff() != 1).flatten() + 1).tolist(), len(found)]
    return tuple(Run(int(found[first]), end - first) for first, end in pairwise(ends) if end > first)


def _split(parameter: Any, whole: Tensor, dims: Collection[int]) -> Tensor:
    """This rank's block of a whole tensor that is divided only in some dimensions."""
    for at, placement in enumerate(parameter.placements):
        if not placement.is_replicate() and placement.dim in dims:
            mesh = parameter.device_mesh
            parts = placement._split_tensor(whole, mesh.size(at), with_padding=False, contiguous=False)[0]
            whole = parts[mesh.get_local_rank(at)]
    return whole


def follow_local(parameter: nn.Parameter) -> None:
    """Let a DTensor have the dtype and the storage offset that its local tensor has got; it keeps its
    identity and its hooks."""
    given: Any = parameter
    if not is_distributed(parameter):
        return
    module, local = sys.modules["torch.distributed.tensor"], given._local_tensor
    made = module.DTensor(local, _spec(given, local.dtype), requires_grad=False)
    twin: Any = nn.Parameter(made, requires_grad=parameter.requires_grad)
    twin._local_tensor = local
    twin.__dict__.update(parameter.__dict__)
    hooks, accumulated = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    del made
    torch.utils.swap_tensors(parameter, twin)
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks, accumulated


def _spec(parameter: Any, dtype: torch.dtype) -> Any:
    spec = parameter._spec
    meta = spec.tensor_meta._replace(dtype=dtype)
    return type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
