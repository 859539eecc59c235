"""What `param.grad` is between a backward and its step: a stand-in that answers for the slices on all ranks.

In that interval the engine holds the gradients, as this rank's slices of the sum over ranks. Loops ask little
of them: whether they are there, a norm, a multiplication, zeros. The stand-in answers that without gathering
anything, and gathers the parameter's whole gradient for everything else. What it is asked for in that way is
collective: every rank has to ask.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map

from zero.errors import UsageError
from zero.sharding.distributed import as_distributed, is_distributed, local_gradient
from zero.sharding.guard import WithoutValues, describe, gradients_of, set_gradient

if TYPE_CHECKING:
    from zero.whole.held_gradients import HeldGradients

Multiplier = float | Tensor
"""A number, or a tensor of one element."""

Answer = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What takes the place of a function. It is called with that function and its arguments."""


class GradientStandIn(WithoutValues, Tensor):
    """Shape, dtype and device of a gradient, without a byte of it.

    answers: what it does when a function is called with it; the rest is for `answer`.
    """

    answers: ClassVar[Mapping[Callable[..., Any], Answer]] = {}

    @staticmethod
    def __new__(cls, parameter: nn.Parameter, held: HeldGradients | None) -> Self:
        made: Self = Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.untyped_storage().device,
        )
        made.__dict__["_held"] = weakref.ref(held) if held else lambda: None
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = cls.answers.get(func)
        if known is not None:
            return known(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls.answer(func, args, kwargs or {})

    @property
    def of(self) -> tuple[nn.Parameter, HeldGradients]:
        """The parameter that it is the gradient of, and what stands behind it."""
        place, held = self.__dict__["_place"](), self.__dict__["_held"]()
        if held is None or place is None:
            raise UsageError("this gradient's engine no longer exists: read gradients before it is freed")
        return place.parameter, held

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = type(self).__name__
        return f"{name}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


class PieceGradient(GradientStandIn):
    """Of one of the optimizer's parameters: a piece, of which this rank alone has the gradient.

    It answers a GradScaler, which knows the optimizer only.
    """

    @classmethod
    def answer(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise UsageError(f"{describe(func)} {_OF_A_PIECE}")


class ShardedGradient(GradientStandIn):
    """Of a model's parameter."""

    def whole(self) -> Tensor:
        """The gradient as a plain tensor, or as a DTensor like the parameter. Collective."""
        parameter, held = self.of
        return as_distributed(parameter, held.full(parameter).to(self.dtype))

    def full_tensor(self) -> Tensor:
        """`whole`, by the name that it has where gradients are DTensors. Collective; of a DTensor's gradient
        all its blocks, over its own mesh, too."""
        whole: Any = self.whole()
        full: Tensor = whole.full_tensor() if is_distributed(whole) else whole
        return full

    @classmethod
    def answer(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make way for a gradient that autograd is about to add to this one: hooks take it from its place.

        Where it is the first that a backward comes to, nothing has told of that backward. A program's own
        calls are answered with whole gradients.
        """
        if func in _ACCUMULATING and torch._C._current_graph_task_id() >= 0 and type(args[1]) is Tensor:
            parameter, held = args[0].of
            held.make_way(parameter)
            if func is torch.ops.aten.add.Tensor:  # create_graph=True
                return args[1]
            with torch._C.DisableTorchFunctionSubclass():
                parameter.grad = args[1]
            return args[0]
        return _answer_whole(func, args, kwargs)


class _GradientPlace:
    """Where a stand-in is: it must not hold the parameter, nor be a weak reference to it, which torch refuses
    where a parameter gets other memory (`torch.utils.swap_tensors`)."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter


class StandIns:
    """Puts stand-ins in place of gradients, and takes them away."""

    def __init__(self, kind: type[GradientStandIn]) -> None:
        self._kind = kind
        # By id: hashing a tensor is a call in Python. A place holds its parameter, so no other gets the id.
        self._made: dict[int, Tensor] = {}
        self._places: dict[int, _GradientPlace] = {}
        self._shown: dict[int, nn.Parameter] = {}

    def show(self, parameters: Iterable[nn.Parameter], held: HeldGradients | None = None) -> None:
        """Set the `grad` of each of these parameters to its stand-in. held: what stands behind them, always
        the same; None: they only refuse."""
        shown = {id(parameter): parameter for parameter in parameters}
        with torch._C.DisableTorchFunctionSubclass():  # without the guard of sharded parameters
            for key, parameter in shown.items():
                made = self._made.get(key)
                if made is None or made.dtype is not parameter.dtype or made.device != parameter.device:
                    made = self._make(parameter, held)
                set_gradient(parameter, made)
        self._shown |= shown

    def changed(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters whose stand-in somebody has removed since, and those whose stand-in somebody has
        replaced by something else."""
        made = map(self._made.__getitem__, self._shown)
        now = zip(self._shown.values(), gradients_of(self._shown.values()), made, strict=True)
        found = [(parameter, gradient) for parameter, gradient, made in now if gradient is not made]
        return [p for p, gradient in found if gradient is None], [
            p for p, gradient in found if gradient is not None
        ]

    def others(self, parameters: Collection[nn.Parameter]) -> list[nn.Parameter]:
        """Those of these parameters that have a gradient which is none of the engine's."""
        now = zip(parameters, gradients_of(parameters), strict=True)
        return [p for p, gradient in now if gradient is not None and id(p) not in self._shown]

    def hide(self, which: Iterable[nn.Parameter] | None = None) -> None:
        """Take the stand-ins of these parameters away; without an argument, all."""
        keys = list(self._shown) if which is None else map(id, which)
        with torch._C.DisableTorchFunctionSubclass():
            for key in keys:
                if key in self._shown:
                    set_gradient(self._shown.pop(key), None)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """In the block, parameters have no gradients: a compiler would take stand-ins for tensors."""
        gone = {id(parameter) for found in self.changed() for parameter in found}
        there = {key: parameter for key, parameter in self._shown.items() if key not in gone}
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in there.values():
                set_gradient(parameter, None)
        try:
            yield
        finally:
            with torch._C.DisableTorchFunctionSubclass():
                for key, parameter in there.items():
                    if key in self._shown:  # it was not hidden meanwhile
                        set_gradient(parameter, self._made[key])

    def _make(self, parameter: nn.Parameter, held: HeldGradients | None) -> Tensor:
        made = self._made[id(parameter)] = self._kind(parameter, held)
        place = self._places.setdefault(id(parameter), _GradientPlace(parameter))
        made.__dict__["_place"] = weakref.ref(place)
        return made


def _answer_norm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`vector_norm` and `norm`, of all elements."""
    given, order = (*args, _order_in(kwargs))[:2]
    order = 2.0 if order in (None, "fro") else order
    more = args[2:] or (kwargs and any(kwargs.get(name) not in (None, False) for name in _OF_A_NORM))
    if more or not isinstance(given, ShardedGradient) or not isinstance(order, (int, float)):
        return _answer_whole(func, args, kwargs)
    parameter, held = given.of
    return held.norms_of([parameter], float(order)).to(given.dtype).squeeze(0)


_OF_A_NORM = ("dim", "keepdim", "dtype", "out")


def _order_in(kwargs: dict[str, Any]) -> Any:
    return kwargs.get("ord", kwargs.get("p", 2.0))


def _answer_norms(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch._foreach_norm`."""
    tensors, *more = args
    order = (*more, _order_in(kwargs))[0]
    wanted = (*more, None, kwargs.get("dtype"))[1] or kwargs.get("dtype")
    with torch._C.DisableTorchFunctionSubclass():
        dtypes = {each.dtype for each in tensors}
    together = _together(tensors) if len(dtypes) == 1 and wanted is None else None
    if together is None:
        return [torch.linalg.vector_norm(each, order, dtype=wanted) for each in tensors]
    parameters, held = together
    return [*held.norms_of(parameters, float(order)).to(dtypes.pop()).unbind()]


def _answer_product(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`mul_` and `div_`, by one number."""
    given, by = (*args, kwargs.get("other"))[:2]
    if not isinstance(given, ShardedGradient) or not _is_number(by) or kwargs.keys() - {"other"}:
        return _answer_whole(func, args, kwargs)
    parameter, held = given.of
    held.multiply([parameter], 1 / by if func in _DIVISIONS else by)
    return given


def _answer_products(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`torch._foreach_mul_` and `torch._foreach_div_`."""
    tensors, by = args
    if _is_number(by) and (together := _together(tensors)):
        parameters, held = together
        held.multiply(parameters, 1 / by if func in _DIVISIONS else by)
        return
    each = by if isinstance(by, (list, tuple)) else [by] * len(tensors)
    for tensor, number in zip(tensors, each, strict=True):
        tensor.div_(number) if func in _DIVISIONS else tensor.mul_(number)


def _together(tensors: Sequence[Any]) -> tuple[list[nn.Parameter], HeldGradients] | None:
    """The parameters of stand-ins, and what stands behind them all; None unless one thing does."""
    if not all(type(each) is ShardedGradient for each in tensors):
        return None
    found = [each.of for each in tensors]
    held = {id(each) for _, each in found}
    return ([parameter for parameter, _ in found], found[0][1]) if len(held) == 1 else None


def _answer_zero(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`zero_`."""
    parameter, held = args[0].of
    held.zero(parameter)
    return args[0]


def _answer_zeros(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`torch._foreach_zero_`."""
    for tensor in args[0]:
        tensor.zero_()


def _answer_scaler(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    stand_ins, found_inf, inverse = args
    pieces, held = zip(*(each.of for each in stand_ins), strict=True)
    held[0].unscale(pieces, found_inf, inverse)


def _answer_device(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where a GradScaler puts its numbers: pieces without values are on the meta device."""
    held = args[0].__dict__["_held"]()
    with torch._C.DisableTorchFunctionSubclass():
        found: torch.device = func(*args) if held is None else held.device
    return found


@torch.no_grad()
def _answer_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any other function, of whole gradients. One that changes its first argument, or writes to `out`,
    changes the gradient."""
    if _takes_each(func, args, kwargs):  # so that they are not whole all at once
        parts = [_answer_whole(func, ([each], *args[1:]), kwargs) for each in args[0]]
        return [part for (part,) in parts]
    wholes: dict[int, Tensor] = {}

    def whole(value: Any) -> Any:
        if not isinstance(value, ShardedGradient):
            return value
        if id(value) not in wholes:
            wholes[id(value)] = value.whole()
        return wholes[id(value)]

    changes = _changes_in_place(func)
    targets = [kwargs.get("out")]
    if changes:
        targets += args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    args_, kwargs_ = tree_map(whole, (args, kwargs))
    result = func(*args_, **kwargs_)
    for target in targets:
        if isinstance(target, ShardedGradient):
            parameter, held = target.of
            held.put(parameter, local_gradient(parameter, wholes[id(target)]))
    return args[0] if changes else kwargs.get("out", result)


def _takes_each(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function does the same to each of several tensors by itself."""
    others = (*args[1:], *kwargs.values())
    several = getattr(func, "__name__", "").startswith("_foreach_") and len(args[0]) > 1
    return several and not any(isinstance(each, (list, tuple)) for each in others)


def _changes_in_place(func: Callable[..., Any]) -> bool:
    """By the name: `add_`, `__iadd__` and `__setitem__`."""
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not isinstance(value, ShardedGradient)
    return isinstance(value, (int, float))


def _refuse(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UsageError(
        f"{describe(func)} cannot be had of a parameter's `.grad`, whose values are sharded over the ranks "
        "until the step. If an optimizer asks for it that was made after zero.initialize: give the engine "
        "every optimizer. engine.full_gradient(name) returns a whole gradient, to do anything with"
    )


_IN_PLACE = frozenset(
    """
    __setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__
    __ixor__ __ilshift__ __irshift__
    """.split()  # noqa: SIM905
)
_ACCUMULATING = frozenset((torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor))
_DIVISIONS = frozenset(
    (Tensor.div_, Tensor.divide_, Tensor.true_divide_, Tensor.__itruediv__, torch._foreach_div_)
)
_DATA: Any = Tensor.data
_IS_SPARSE: Any = Tensor.is_sparse
_DEVICE: Any = Tensor.device
PieceGradient.answers = {
    torch._amp_foreach_non_finite_check_and_unscale_: _answer_scaler,
    _DEVICE.__get__: _answer_device,
}
ShardedGradient.answers = {
    # Optimizers ask for is_sparse before they decay a weight: early enough to stop one that was made after
    # the engine, which would step whole gradients behind its back.
    **dict.fromkeys((_IS_SPARSE.__get__, Tensor.set_, Tensor.resize_, _DATA.__set__), _refuse),
    **dict.fromkeys((torch.linalg.vector_norm, torch.norm, Tensor.norm), _answer_norm),
    torch._foreach_norm: _answer_norms,
    **dict.fromkeys((Tensor.mul_, Tensor.multiply_, Tensor.__imul__), _answer_product),
    **dict.fromkeys((Tensor.div_, Tensor.divide_, Tensor.true_divide_, Tensor.__itruediv__), _answer_product),
    **dict.fromkeys((torch._foreach_mul_, torch._foreach_div_), _answer_products),
    Tensor.zero_: _answer_zero,
    torch._foreach_zero_: _answer_zeros,
    **dict.fromkeys((Tensor.detach, Tensor.detach_, _DATA.__get__), lambda func, args, kwargs: args[0]),
}
getattr(_foreach_utils, "_foreach_supported_types", []).append(ShardedGradient)
"""Torch's clipping then asks for all gradients at once, as it does of DTensors: half the time. The list is
private; without it, each is asked for by itself."""

_OF_A_PIECE = (
    "needs the values of the gradient of an optimizer's parameter, which is a slice and of this rank alone. "
    "Clip, measure and change gradients through model.parameters(), or set Config(clip_norm=...)"
)
