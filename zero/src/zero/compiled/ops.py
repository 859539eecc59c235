"""The operations that passes put into graphs: torch.library operators of the namespace `zero`.

They stand in graphs that AOTAutograd has made functional already. Arguments that an operation does not
write to are declared as written (`a!`) where order matters: a compiler then keeps a release behind every
reader of the values, a gather behind its prefetch, and neither is dead code.

    allgather_params   whole values of parameters of one unit. params: the graph's inputs for them.
    prefetch_params    begins the same, for a later allgather_params.
    release_params     the values are not read any more. keep: their bytes may stay. after: results of their
                       readers, see `passes.tie_releases`.
    reduce_grad        hands a gradient to the engine. last: the unit's last one in this graph.

engine: a handle, see `runtime.lookup`. cast: the dtype that fp32 parameters travel in; None: their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero.compiled import runtime
from zero.guard import admit

NAMESPACE = "zero"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(
    "allgather_params(Tensor(a)[] params, int engine, int[] numbers, ScalarType? cast=None) -> Tensor(a)[]"
)
_library.define("prefetch_params(Tensor(a!)[] params, int engine, int unit, ScalarType? cast=None) -> ()")
_library.define(
    "release_params(Tensor(a!)[] values, int engine, int unit, bool keep=False, Tensor[]? after=None) -> ()"
)
_library.define("reduce_grad(Tensor(a!) gradient, int engine, int number, bool last=False) -> ()")


@torch.library.impl(_library, "allgather_params", "CompositeExplicitAutograd")
def _allgather_params(
    params: list[Tensor], engine: int, numbers: list[int], cast: torch.dtype | None = None
) -> list[Tensor]:
    return runtime.lookup(engine).gather(numbers, cast)


@torch.library.impl(_library, "prefetch_params", "CompositeExplicitAutograd")
def _prefetch_params(params: list[Tensor], engine: int, unit: int, cast: torch.dtype | None = None) -> None:
    runtime.lookup(engine).prefetch(unit, cast)


@torch.library.impl(_library, "release_params", "CompositeExplicitAutograd")
def _release_params(
    values: list[Tensor], engine: int, unit: int, keep: bool = False, after: Sequence[Tensor] | None = None
) -> None:
    runtime.lookup(engine).release(unit, keep)


@torch.library.impl(_library, "reduce_grad", "CompositeExplicitAutograd")
def _reduce_grad(gradient: Tensor, engine: int, number: int, last: bool = False) -> None:
    runtime.lookup(engine).reduce(number, gradient, last)


def _fake_gather(
    params: list[Tensor], engine: int, numbers: list[int], cast: torch.dtype | None = None
) -> list[Tensor]:
    return [torch.empty_like(p, dtype=gathered_dtype(p.dtype, cast)) for p in params]


def _nothing(*_: object, **__: object) -> None:
    """What an operation without a result does to fake tensors."""


torch.library.register_fake("zero::allgather_params", _fake_gather, lib=_library)
for _name in ("prefetch_params", "release_params", "reduce_grad"):
    torch.library.register_fake(f"zero::{_name}", _nothing, lib=_library)

ALLGATHER = torch.ops.zero.allgather_params.default
PREFETCH = torch.ops.zero.prefetch_params.default
RELEASE = torch.ops.zero.release_params.default
REDUCE = torch.ops.zero.reduce_grad.default


def gathered_dtype(dtype: torch.dtype, cast: torch.dtype | None) -> torch.dtype:
    """The dtype in which values of a `dtype` parameter come out of a gather."""
    return cast if cast is not None and dtype is torch.float32 else dtype


for _operation in (ALLGATHER, PREFETCH, RELEASE, REDUCE):
    admit(_operation)  # called with parameters that are sharded
    admit(_operation.overloadpacket)
