"""`model.to(...)` and its like, once a model has an engine: what changes no parameter is allowed.

Scripts move models to where they are already. Of a sharded parameter torch would need values for that, and of
a whole one it would replace the memory. So the modules of a model with an engine first see, on probes without
values, what a call would do to each parameter, and change nothing if it would change one. Otherwise buffers,
which every rank has whole, move as in torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from zero.errors import ShardedParameterError
from zero.sharding.alterations import form_of
from zero.sharding.guard import NAME_ATTRIBUTE, OWNER_ATTRIBUTE, WithoutValues, describe
from zero.sharding.lifetime import Uncopied

_APPLY = "_apply"
"""Key in a module's __dict__ of its `_Moves`: the method through which torch moves and converts modules."""

_CONVERSIONS = frozenset("to type float double half bfloat16 contiguous".split())  # noqa: SIM905
"""Methods that return the tensor itself where it is already what they make of it, besides devices' names."""


def guard_moves(model: nn.Module) -> None:
    """Have the model, and every module that has parameters in it, refuse to change them by `to(...)` and its
    like."""
    for module in model.modules():
        if any(True for _ in module.parameters()):
            module.__dict__[_APPLY] = _Moves(module)


class _Moves(Uncopied):
    """`nn.Module._apply` of one module, which holds this."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        module = self._module()
        assert module is not None, "a module was moved after it had gone"
        _check_unchanged(module.parameters(recurse), convert)
        _move(module, convert, recurse)
        return module


def _check_unchanged(parameters: Iterable[nn.Parameter], convert: Callable[[Tensor], Tensor]) -> None:
    for parameter in filter(_is_owned, parameters):
        probe = _Probe(parameter)
        try:
            unchanged = convert(probe) is probe
        except _ChangeError as change:
            raise _refused(parameter, str(change)) from None
        if not unchanged:
            raise _refused(parameter, "by other values")


def _move(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool) -> None:
    """Convert what is no parameter of an engine's."""
    for child in module.children() if recurse else ():
        if isinstance(child.__dict__.get(_APPLY), _Moves):
            _move(child, convert, recurse)
        else:
            child._apply(convert)  # torch's, or the child's own
    known = module._parameters
    others = {name: p for name, p in known.items() if p is not None and not _is_owned(p)}
    module.__dict__["_parameters"] = others
    try:
        nn.Module._apply(module, convert, recurse=False)
    finally:
        module.__dict__["_parameters"] = known | others


def _is_owned(parameter: nn.Parameter) -> bool:
    return OWNER_ATTRIBUTE in parameter.__dict__


class _ChangeError(Exception):
    """A conversion would change a parameter: into what, or by which function."""


class _Probe(WithoutValues, Tensor):
    """Stands for a parameter in a conversion: shape, strides, dtype and device without values."""

    @staticmethod
    def __new__(cls, parameter: nn.Parameter) -> Self:
        made: Self = Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        return made

    @classmethod
    def answer(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, probe = getattr(func, "__name__", ""), args[0] if args else None
        if isinstance(probe, cls) and (name in _CONVERSIONS or name == probe.device.type):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        raise _ChangeError(f"by {describe(func)}")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given = kwargs or {}
        if _names_this_device(args[0], given):
            return args[0]
        raise _ChangeError(f"to {_wanted(args[0], given)}")


def _names_this_device(probe: Tensor, given: Mapping[str, Any]) -> bool:
    """Whether a conversion, for which torch would copy, asks for no more than the probe's own device, with an
    index where it has none: cpu:0."""
    device = given.get("device")
    if not isinstance(device, torch.device) or device.index is None or probe.device.index is not None:
        return False
    return device.type == probe.device.type and given.get("dtype") in (None, probe.dtype)


def _wanted(probe: Tensor, given: Mapping[str, Any]) -> str:
    """Name what a conversion asks for that the probe has not."""
    has = {"dtype": probe.dtype, "device": probe.device}
    asked = [given[name] for name in ("dtype", "device", "memory_format") if name in given]
    return ", ".join(str(each) for each in asked if each not in has.values()) or "a copy"


def _refused(parameter: nn.Parameter, change: str) -> ShardedParameterError:
    return ShardedParameterError(
        f"model.to(...) and the like would change parameter {parameter.__dict__[NAME_ATTRIBUTE]!r}, "
        f"{form_of(parameter)}, {change}; nothing has been changed, because the engine has shards and "
        "optimizer state of it as it is. Move and convert the model before zero.initialize, and choose the "
        "dtype to train in by Config(precision=...). For values of another kind, convert those of "
        "engine.state_dict(), or copies made inside `with zero.gathered(model):`"
    )
