"""Make sharded parameters raise on access to values that they do not have.

A released parameter keeps its shape but has no bytes behind it; reading it would be a segmentation fault.
While it is released its `__class__` is `ShardedParameter`, whose `__torch_function__` lets metadata through
and raises for everything else. Swapping the class costs nothing on the hot path and keeps the object's
identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zero.errors import ShardedParameterError
from zero.sharding.forms import has_own_dispatch

NAME_ATTRIBUTE = "_zero_name"
OWNER_ATTRIBUTE = "_zero_owner"
"""Key of what an engine's whole values come from, in its model's parameters' and modules' __dict__."""

REASON_ATTRIBUTE = "_zero_reason"
UNIT_ATTRIBUTE = "_zero_unit"
"""Key in a parameter's __dict__ of a reference to the hooks of its unit."""

# What is allowed on a parameter that has no values: attributes to read, attributes to write, methods and
# functions. Adagrad makes its state when it is made itself.
_READABLE = frozenset(
    """
    shape dtype device layout ndim grad grad_fn requires_grad is_leaf names itemsize nbytes
    retains_grad output_nr _version _backward_hooks _post_accumulate_grad_hooks
    is_sparse is_quantized is_meta is_nested is_mkldnn is_cpu is_cuda is_xpu is_hpu is_mps
    """.split()  # noqa: SIM905
)
_WRITABLE = frozenset(("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"))
_METHODS = frozenset(
    """
    size dim ndimension numel nelement stride storage_offset untyped_storage element_size get_device has_names
    is_contiguous is_floating_point is_complex is_signed is_inference is_pinned is_same_size is_tensor
    _is_view __len__ __hash__ requires_grad_ register_hook register_post_accumulate_grad_hook
    zeros_like ones_like full_like
    """.split()  # noqa: SIM905
)

_GRAD: Any = Tensor.grad
set_gradient: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__
"""Sets `grad`; of a sharded parameter, where torch functions of subclasses are disabled."""

_serving: set[Callable[..., Any]] = set()


def admit(operation: Callable[..., Any]) -> None:
    """Allow `operation` on sharded parameters: it reads none of their values."""
    _serving.add(operation)


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """The `grad` of each, without the guard of sharded parameters."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_GRAD.__get__, parameters))


class WithoutValues:
    """Base of tensors that have no values: metadata is let through, and `answer` is asked for the rest."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_metadata(func) or func in _serving:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return cls.answer(func, args, kwargs or {})

    @classmethod
    def answer(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What takes the place of a function that needs values."""
        found = _first_sharded(args, kwargs)
        raise _refused(func, {} if found is None else found.__dict__)


class ShardedParameter(WithoutValues, nn.Parameter):
    """The class of a parameter whose values are sharded over the ranks."""

    @classmethod
    def answer(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.autograd.backward:  # with inputs=
            return func(*args, **{**kwargs, "inputs": _as_edges(kwargs["inputs"])})
        found = _first_sharded(args, kwargs)
        own = {} if found is None else found.__dict__
        hooks = own[UNIT_ATTRIBUTE]() if UNIT_ATTRIBUTE in own else None
        if hooks is not None and hooks.gather_for_part():
            return func(*args, **kwargs)
        if func is torch.Tensor.detach and _blocks and REASON_ATTRIBUTE not in own:
            return AbsentValues.of(args[0])
        raise _refused(func, own)

    @property
    def grad(self) -> Tensor | None:
        """As a parameter's. Read and set for every parameter in every step: a third of the time that it takes
        through `__torch_function__`."""
        with torch._C.DisableTorchFunctionSubclass():
            return _GRAD.__get__(self)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__delete__(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = self.__dict__.get(NAME_ATTRIBUTE, "?")
        return f"ShardedParameter({name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


class AbsentValues(WithoutValues, torch.Tensor):
    """What `parameter.detach()` gives, inside a `zero.gathered` block, of a parameter that is not in it.

    So `model.state_dict()` has all names there, of which programs may take those that are in the block. It
    has a parameter's shape and dtype, and no memory.
    """

    @classmethod
    def of(cls, parameter: ShardedParameter) -> AbsentValues:
        shape, stride = tuple(parameter.shape), parameter.stride()
        values = torch.empty_strided(shape, stride, dtype=parameter.dtype, device="meta").as_subclass(cls)
        values.__dict__[NAME_ATTRIBUTE] = parameter.__dict__.get(NAME_ATTRIBUTE, "?")
        return values

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentValues({self.__dict__[NAME_ATTRIBUTE]!r}, shape={tuple(self.shape)})"


_blocks: list[object] = []  # the `zero.gathered` blocks that this process is in


@contextmanager
def detachable() -> Iterator[None]:
    """In the block, `detach()` of a sharded parameter gives `AbsentValues`; everything else still raises."""
    _blocks.append(None)
    try:
        yield
    finally:
        _blocks.pop()


@cache
def sharded_class(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of a sharded parameter that has been of class `kind`.

    A wrapper's has to be derived from its own, which may have slots.
    """
    if not has_own_dispatch(kind) or issubclass(kind, ShardedParameter):
        return ShardedParameter
    return type(f"Sharded{kind.__name__}", (ShardedParameter, kind), {})


def has_engine(model: nn.Module) -> bool:
    """Whether an engine has any of a model's parameters."""
    return any(OWNER_ATTRIBUTE in parameter.__dict__ for parameter in model.parameters())


def abandon(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Guard parameters permanently, under their names: their values will not come back."""
    for name, parameter in named:
        parameter.__dict__ |= {NAME_ATTRIBUTE: name, REASON_ATTRIBUTE: LOST}
        if not isinstance(parameter, ShardedParameter):
            parameter.__class__ = sharded_class(type(parameter))


def is_metadata(func: Callable[..., Any]) -> bool:
    """Return whether a function of a tensor needs none of its values."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute in (_READABLE if name == "__get__" else _WRITABLE)
    return name in _METHODS


def _as_edges(inputs: Tensor | GradientEdge | Sequence[Tensor | GradientEdge]) -> list[Tensor | GradientEdge]:
    """Where a backward ends, with edges of the graph in place of sharded parameters."""
    given = [inputs] if isinstance(inputs, (Tensor, GradientEdge)) else inputs
    with torch._C.DisableTorchFunctionSubclass():
        return [get_gradient_edge(each) if isinstance(each, ShardedParameter) else each for each in given]


def describe(func: Callable[..., Any]) -> str:
    """Name the function that was called, for a message."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"`.{getattr(getattr(func, '__self__', None), '__name__', '?')}`"
    return f"`{name}`"


def _refused(func: Callable[..., Any], own: dict[str, Any]) -> ShardedParameterError:
    why = REPLAYED if isinstance(func, OpOverload) else SHARDED
    name, reason = own.get(NAME_ATTRIBUTE, "?"), own.get(REASON_ATTRIBUTE, why)
    if func is Tensor.view_as and reason is SHARDED:  # how they find a parameter's place in the graph
        reason = f"{SHARDED}. {SCHEDULES}"
    return ShardedParameterError(f"{describe(func)} needs the values of parameter {name!r}, {reason}")


def _first_sharded(args: Iterable[Any], kwargs: dict[str, Any]) -> ShardedParameter | AbsentValues | None:
    values = [*args, *kwargs.values()]
    while values:
        value = values.pop(0)
        if isinstance(value, (ShardedParameter, AbsentValues)):
            return value
        if isinstance(value, (list, tuple)):
            values.extend(value)
    return None


SHARDED = (
    "which is sharded over the ranks. Call its module (not module.forward), or read it inside `with "
    "zero.gathered(parameter):`; engine.state_dict() has the whole model. Resize embeddings, convert and "
    "wrap layers before zero.initialize"
)
SCHEDULES = (
    "Of a pipeline's schedules, GPipe, 1F1B and Interleaved1F1B run; those that compute gradients of weights "
    "by themselves (zero bubble) do with PipelineStage(..., dw_builder=lambda: lambda: None), which has "
    "stages compute all gradients at once"
)
REPLAYED = (
    "which is sharded over the ranks, and which a recorded graph uses after its module has returned. Call "
    "torch.func.linearize, make_fx and the like, and what they return, inside `with zero.gathered(model):`"
)
ANEW = "free the model and the optimizer, and build them again"
LOST = f"which a failed zero.initialize left incomplete: {ANEW}"
UNBORN = (
    "which was made under zero.init() and has no values yet. Resize, tie and convert parameters inside the "
    "zero.init block. After zero.initialize(), `with zero.gathered(parameter):` shows them whole"
)
