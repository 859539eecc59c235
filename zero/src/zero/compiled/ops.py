"""The operations that passes put into graphs: torch.library operators of the namespace `zero`.

They stand in graphs that AOTAutograd has already made functional. Arguments that an operation does not
write to are declared as written (`a!`) where order matters: a compiler then keeps a release after every
reader of the values and the wait for a gather after its beginning, and takes none of them for dead code.

    allgather_param        begins to gather a unit, without waiting. params: the graph's inputs for it.
    prefetch_params_fused  begins to gather several units, ahead of their use.
    wait_allgather         whole values of parameters of one unit; begins the gather if nothing has.
    release_param          the values are not read any more. keep: their bytes may stay. after: results of
                           their readers, see `passes.tie_releases`.
    reduce_grad            hands a gradient to the engine. last: the unit's last one in this graph.
    reload_parameter       begins to bring a unit's shards to the device, from the host or disk.
    offload_parameter      the unit is gathered: its shards need not be there any more.
    reload_optimizer       begins to bring units' optimizer state to the device, in a backward that a step
                           follows. params: the graph's inputs for parameters.
    offload_optimizer      begins to send it back, where it has stayed since the step.
    wait_offload_optimizer waits until it is on the host, sent before or not; its memory is then free.
    offload_tensor         begins to copy an activation to the host, and returns that copy.
    wait_offload           what follows comes after that copy; the activation's memory is free.
    reload_tensor          begins to copy it back, to memory of `device`.
    wait_reload            what follows comes after that copy, and may read it.
    end_backward           comes after everything else in a backward. params: the graph's inputs for
                           parameters.

engine: a handle, see `runtime.lookup`. dtype: what the unit's fp32 parameters travel in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelz import HOST
from zero.compiled.runtime import Runtime, lookup
from zero.optimizer.record_streamer import RecordStreamer
from zero.sharding.guard import admit
from zero.sharding.sharded_unit import ShardedUnit

NAMESPACE = "zero"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _nothing(*_: object, **__: object) -> None:
    """What an operation without a result does to fake tensors."""


def _define(
    signature: str, run: Callable[..., Any], fake: Callable[..., Any] = _nothing
) -> torch._ops.OpOverload:
    """Define an operation of graphs with this signature, which `run` carries out on every device. fake: what
    it makes of fake tensors."""
    name = signature.partition("(")[0]
    _library.define(signature)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    packet = getattr(torch.ops.zero, name)
    for called in (packet, packet.default):
        admit(called)  # with parameters that are sharded
    operation: torch._ops.OpOverload = packet.default
    return operation


_NUMBERED = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16}  # c10::ScalarType


def _named(dtype: torch.dtype | int) -> torch.dtype:
    """The dtype itself: torch 2.11 hands a ScalarType to Python as its number."""
    return _NUMBERED[dtype] if isinstance(dtype, int) else dtype


def _of_parameters(name: str, arguments: str, method: Callable[..., None]) -> torch._ops.OpOverload:
    """Define an operation that has the runtime do something about units, and reads no values. arguments:
    those after the graph's inputs and the engine, which are the method's."""
    extra = f", {arguments}" if arguments else ""
    return _define(
        f"{name}(Tensor(a!)[] params, int engine{extra}) -> ()",
        lambda params, engine, *arguments: method(lookup(engine), *arguments),
    )


def _of_records(name: str, act: Callable[[RecordStreamer, ShardedUnit], None]) -> torch._ops.OpOverload:
    """Define an operation that does something to the optimizer state of units."""

    def run(runtime: Runtime, units: list[int]) -> None:
        for unit in units:
            act(runtime.record_streamer, runtime.units[unit])

    return _of_parameters(name, "int[] units", run)


def _begin(runtime: Runtime, unit: int, dtype: torch.dtype | int) -> None:
    runtime.begin_gather(unit, _named(dtype))


def _begin_several(runtime: Runtime, units: list[int], dtypes: list[torch.dtype]) -> None:
    for unit, dtype in zip(units, dtypes, strict=True):
        _begin(runtime, unit, dtype)


ALLGATHER = _of_parameters("allgather_param", "int unit, ScalarType dtype", _begin)
PREFETCH = _of_parameters("prefetch_params_fused", "int[] units, ScalarType[] dtypes", _begin_several)
WAIT = _define(
    "wait_allgather(Tensor(a)[] params, int engine, int[] numbers, ScalarType dtype) -> Tensor(a)[]",
    lambda params, engine, numbers, dtype: lookup(engine).gather(numbers, _named(dtype)),
    fake=lambda params, engine, numbers, dtype: [
        torch.empty_like(p, dtype=_named(dtype) if p.dtype is torch.float32 else p.dtype) for p in params
    ],
)
RELEASE = _define(
    "release_param(Tensor(a!)[] values, int engine, int unit, bool keep=False, Tensor[]? after=None) -> ()",
    lambda values, engine, unit, keep=False, after=None: lookup(engine).release(unit, keep),
)
REDUCE = _define(
    "reduce_grad(Tensor(a!) gradient, int engine, int number, bool last=False) -> ()",
    lambda gradient, engine, number, last=False: lookup(engine).reduce(number, gradient, last),
)
RELOAD_PARAMETER = _of_parameters("reload_parameter", "int unit", lambda on, unit: on.units[unit].bring())
OFFLOAD_PARAMETER = _of_parameters(
    "offload_parameter", "int unit", lambda on, unit: on.units[unit].take_back()
)
RELOAD_OPTIMIZER = _of_records("reload_optimizer", RecordStreamer.prefetch)
OFFLOAD_OPTIMIZER = _of_records("offload_optimizer", RecordStreamer.evict)
WAIT_OFFLOAD_OPTIMIZER = _of_records("wait_offload_optimizer", RecordStreamer.wait_evicted)
OFFLOAD = _define(
    "offload_tensor(Tensor value, int engine) -> Tensor",
    lambda value, engine: lookup(engine).activations.offload(value),
    fake=lambda value, engine: value.new_empty_strided(value.size(), value.stride(), device=HOST),
)
WAIT_OFFLOAD = _define(
    "wait_offload(Tensor(a!) copy, Tensor(b!) value, int engine) -> ()",
    lambda copy, value, engine: lookup(engine).activations.wait(copy),
)
RELOAD = _define(
    "reload_tensor(Tensor copy, int engine, Device device) -> Tensor",
    lambda copy, engine, device: lookup(engine).activations.reload(copy, device),
    fake=lambda copy, engine, device: copy.new_empty_strided(copy.size(), copy.stride(), device=device),
)
WAIT_RELOAD = _define(
    "wait_reload(Tensor(a!) value, int engine) -> ()",
    lambda value, engine: lookup(engine).activations.wait(value),
)
END_BACKWARD = _of_parameters("end_backward", "", Runtime.end_backward)
