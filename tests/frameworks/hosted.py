"""torch.distributed for a device that has no communication library: by way of the host.

A vendor's package brings one. Without it the engine's own collectives work, but not those of the frameworks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

OPERATIONS = ("allgather_", "_allgather_base_", "allreduce_", "barrier", "broadcast_")


@functools.cache
def use_the_host(key: str) -> torch.library.Library:
    """Let torch.distributed's calls serve tensors of this dispatch key, for as long as the process lives."""
    library = torch.library.Library("c10d", "IMPL")
    for name in OPERATIONS:
        operation = getattr(torch.ops.c10d, name).default
        library.impl(name, _by_the_host(operation), key, allow_override=True)
    return library


def _by_the_host(operation: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        origins: dict[int, tuple[Tensor, Tensor]] = {}  # by the copy's id, with the copy

        def to_host(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            host = value.detach().cpu()
            origins[id(host)] = value.detach(), host
            return host

        def to_device(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            target, host = origins[id(value)]
            return target.copy_(host)

        found = operation(*pytree.tree_map(to_host, given))
        work = found[-1] if isinstance(found, tuple) else found
        work.wait()
        return pytree.tree_map(to_device, found)

    return run
