"""How a parameter lies in flat buffers: as itself, or as its *leaves*, plain tensors that hold its values.

A parameter that wraps other tensors, or that has scales beside its packed values, keeps its identity, its
name and its place in the module. What is flattened, sharded, gathered, moved between tiers and saved are its
leaves, each under a name of its own, as bits: `weight.qdata`, `weight.scale`. What the parameter is beside
its leaves (shape, block size, format) stays on every rank, where the program has built it.

Known are tensors with torch's `__tensor_flatten__`, which are taken apart to the innermost tensors, and the
packed parameters of bitsandbytes. `register_form` tells of others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero.errors import ModelError, UsageError
from zero.sharding.distributed import (
    INNER_ATTRIBUTE,
    described,
    divided_along,
    is_distributed,
    local_of,
    trained_inside,
)

Leaves = Mapping[str, Tensor]
"""The tensors that hold a parameter's values, by what follows its name and a dot; "" for itself."""

Form = Callable[[nn.Module, nn.Parameter], Leaves]
"""Gives the leaves of a parameter, and the module that holds it: always the same tensor objects, dense and
with memory of their own."""

LEAVES_ATTRIBUTE = "_zero_leaves"
"""Key in a parameter's __dict__ of its `Leaves`, once an engine has it."""

RECORDING_ATTRIBUTE = "_zero_recording"
"""Key in the __dict__ of a parameter of zero.init() that has no values yet, of (its recording, its class)."""

_DESCRIPTION_ATTRIBUTE = "_zero_form"

TWINS_ATTRIBUTE = "_zero_twins"
"""Key in a parameter's __dict__ of other tensors over its memory, which a program computes with."""

Description = Callable[[Any], str]
"""Says all that tells a parameter's format from others: checkpoints and ranks compare it."""

_forms: dict[str, tuple[Form, Description]] = {}


def register_form(kind: type[nn.Parameter] | str, form: Form, description: Description | None = None) -> None:
    """Have parameters of a class, or of one derived from it, lie in flat buffers as the leaves that `form`
    gives, for models that are given to zero.initialize from now on.

    kind: the class, or its module and name as text, as in "bitsandbytes.nn.modules.Params4bit", for a library
    that need not be imported. Such parameters have to be frozen.
    """
    if not callable(form) or not isinstance(kind, (type, str)):
        raise UsageError(
            "register_form takes a class of parameters, and a function of a module and a parameter"
        )
    _forms[kind if isinstance(kind, str) else _path(kind)] = form, description or (lambda parameter: "")
    _known_form.cache_clear()


def inner_leaves(model: nn.Module) -> dict[nn.Parameter, Leaves]:
    """The leaves of the model's parameters that have others than themselves; empty for most models."""
    found: dict[nn.Parameter, Leaves] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and type(parameter) is not nn.Parameter and parameter not in found:
                leaves = _leaves_of(module, parameter)
                if leaves is not None:
                    found[parameter] = leaves
    return found


def packed_leaves(model: nn.Module) -> set[nn.Parameter]:
    """The leaves inside the model's parameters, whose values mean nothing in another dtype."""
    return {as_parameter(leaf) for leaves in inner_leaves(model).values() for leaf in leaves.values()}


def with_tensors_inside(model: nn.Module) -> list[str]:
    """The names of the parameters that have their values in other tensors, or in others too; but DTensors."""
    inner, named = inner_leaves(model), model.named_parameters()
    return [name for name, p in named if p in inner or trained_inside(p) is not None]


def leaves_of(parameter: nn.Parameter) -> list[nn.Parameter]:
    """The leaves of an engine's parameter."""
    leaves: Leaves | None = parameter.__dict__.get(LEAVES_ATTRIBUTE)
    return [parameter] if leaves is None else [as_parameter(leaf) for leaf in leaves.values()]


def named_leaves(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the leaves of all parameters, under each of their names."""
    inner = inner_leaves(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for suffix, leaf in inner.get(parameter, {"": parameter}).items():
            yield name_of(name, suffix), as_parameter(leaf)


def is_apart(parameter: nn.Parameter, leaves: Leaves) -> bool:
    """Whether a parameter is none of its own leaves: a wrapper, without memory of its own."""
    return not any(leaf is parameter for leaf in leaves.values())


def name_of(parameter: str, suffix: str) -> str:
    return f"{parameter}.{suffix}" if suffix else parameter


def as_parameter(leaf: Tensor) -> nn.Parameter:
    """A leaf for what takes parameters: it is treated as one that is frozen."""
    return cast(nn.Parameter, leaf)


def adopt(model: nn.Module) -> None:
    """Note the leaves of the model's parameters, what they are trained in, and other tensors over their
    memory.

    bitsandbytes' 8-bit layers compute with such a twin of their packed weight, and give the weight its memory
    after each forward.
    """
    for packed, leaves in inner_leaves(model).items():
        packed.__dict__ |= {LEAVES_ATTRIBUTE: leaves, _DESCRIPTION_ATTRIBUTE: _described(packed)}
    for trained in model.parameters():
        inner = trained_inside(trained)
        if inner is not None:
            trained.__dict__[INNER_ATTRIBUTE] = inner
    for module in model.modules():
        for parameter in module._parameters.values():
            own = {} if parameter is None else parameter.__dict__
            if parameter is not None and "CB" in own and "SCB" in own.get(LEAVES_ATTRIBUTE, ()):
                own["CB"] = None
                state = getattr(module, "state", None)
                if state is not None:  # as after its first forward
                    state.CB, state.SCB, own["SCB"] = parameter.data, own[LEAVES_ATTRIBUTE]["SCB"], None
                    own[TWINS_ATTRIBUTE] = (state.CB,)


def twins_of(parameter: nn.Parameter) -> tuple[Tensor, ...]:
    """Other tensors over a parameter's memory, which have to stay that."""
    twins: tuple[Tensor, ...] = parameter.__dict__.get(TWINS_ATTRIBUTE, ())
    return twins


def _leaves_of(module: nn.Module, parameter: nn.Parameter) -> Leaves | None:
    known: Leaves | None = parameter.__dict__.get(LEAVES_ATTRIBUTE)
    if known is not None:
        return known
    if trained_inside(parameter) is not None:
        return None
    if is_distributed(parameter) and not is_traceable_wrapper_subclass(local_of(parameter)):
        return None
    found = _known_form(_class_of(parameter))
    leaves = None if found is None else found[0](module, parameter)
    return None if leaves is None or list(leaves) == [""] else leaves


@cache
def _known_form(kind: type) -> tuple[Form, Description] | None:
    known = next((_forms[_path(each)] for each in kind.__mro__ if _path(each) in _forms), None)
    return (_of_wrapper, _told) if known is None and hasattr(kind, "__tensor_flatten__") else known


def descriptions(model: nn.Module) -> dict[nn.Parameter, str]:
    """What tells the format of the parameters that have leaves inside, by leaf, and which block a DTensor's
    local tensor is."""
    found = {
        parameter: described(parameter)
        for parameter in model.parameters()
        if is_distributed(parameter) and divided_along(parameter)
    }
    for parameter, leaves in inner_leaves(model).items():
        told = parameter.__dict__.get(_DESCRIPTION_ATTRIBUTE) or _described(parameter)
        found |= {as_parameter(leaf): f"{told}, {suffix}" for suffix, leaf in leaves.items()}
    return found


def _described(parameter: nn.Parameter) -> str:
    kind = _class_of(parameter)
    known = _known_form(kind)
    assert known is not None
    return f"{_path(kind)} {tuple(parameter.shape)} {parameter.dtype} {known[1](parameter)}".strip()


def _class_of(parameter: nn.Parameter) -> type:
    """The parameter's class, which those of zero.init() have only when they get values."""
    return parameter.__dict__.get(RECORDING_ATTRIBUTE, (None, type(parameter)))[1]  # type: ignore[no-any-return]


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _of_wrapper(module: nn.Module, parameter: nn.Parameter) -> Leaves:
    return dict(_inside(parameter, ""))


def _inside(tensor: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the innermost tensors of a wrapper by name, in the order of these: some classes give a set's."""
    for name in sorted(tensor.__tensor_flatten__()[0]):
        inner, path = getattr(tensor, name), prefix + name
        if not isinstance(inner, Tensor):  # a DTensor's mesh
            continue
        if is_traceable_wrapper_subclass(inner):
            yield from _inside(inner, f"{path}.")
        else:
            yield path, inner


def _told(tensor: Any) -> str:
    """What a wrapper says of itself, without where it is and what it is used for."""
    names, context = tensor.__tensor_flatten__()
    inside = [getattr(tensor, name) for name in sorted(names)]
    told = [repr(context), *(_told(each) for each in inside if is_traceable_wrapper_subclass(each))]
    return re.sub(r" at 0x\w+|device\(.*?\)|requires_grad=\w+", "", " ".join(told))


def has_own_dispatch(kind: type[Tensor]) -> bool:
    """Whether a class of tensors answers torch's operations itself, and may have no memory."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def _of_params4bit(module: nn.Module, parameter: Any) -> Leaves:
    """Of bitsandbytes: packed values in some dtype, with scales that may themselves be packed."""
    state = parameter.quant_state
    if state is None:
        if parameter.bnb_quantized or parameter.device.type == "meta":
            return {"": parameter}
        raise ModelError(_UNQUANTISED.format(kind="Params4bit"))
    leaves = {"": parameter, "absmax": state.absmax}
    if state.nested:
        leaves |= {"nested_absmax": state.state2.absmax, "nested_offset": state.offset}
    return leaves


def _of_int8_params(module: nn.Module, parameter: Any) -> Leaves:
    """Of bitsandbytes: 8-bit values, whose scales move to the layer's state in its first forward."""
    if parameter.has_fp16_weights or parameter.device.type == "meta":
        return {"": parameter}
    if parameter.dtype is not torch.int8:
        raise ModelError(_UNQUANTISED.format(kind="Int8Params"))
    scales = parameter.SCB if parameter.SCB is not None else getattr(module, "state", parameter).SCB
    return {"": parameter} if scales is None else {"": parameter, "SCB": scales}


def _of_quant_state(parameter: Any) -> str:
    state = parameter.quant_state
    return f"{state.quant_type} of {tuple(state.shape)} {state.dtype} in blocks of {state.blocksize}"


register_form("bitsandbytes.nn.modules.Params4bit", _of_params4bit, _of_quant_state)
register_form("bitsandbytes.nn.modules.Int8Params", _of_int8_params)

_UNQUANTISED = (
    "the model has weights of class {kind} that are not packed yet, and zero would not pack them: call "
    "model.to(device), which does, before zero.initialize, and in the block of zero.init()"
)
