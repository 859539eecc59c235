"""A quantised weight as libraries make them: a tensor without memory that wraps its codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class Codes(Tensor):
    """int8 codes with one fp32 scale for each row."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Codes:
        made: Codes = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def of(cls, values: Tensor) -> Codes:
        scale = values.abs().amax(1, keepdim=True) / 127
        return cls((values / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Tensor], context: None, shape: Any, stride: Any
    ) -> Codes:
        return cls(inner["codes"], inner["scale"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (aten.detach.default, aten._to_copy.default, aten.clone.default):
            device = {"device": d} if (d := (kwargs or {}).get("device")) else {}
            return cls(*(func(inner, **device) for inner in (args[0].codes, args[0].scale)))
        values = tree_map(lambda each: each.values() if isinstance(each, cls) else each, args)
        return func(*values, **(kwargs or {}))

    def values(self) -> Tensor:
        return self.codes * self.scale


class Nested(Codes):
    """Codes inside another wrapper."""

    inside: Codes

    @staticmethod
    def __new__(cls, inside: Codes) -> Nested:
        made: Nested = Tensor._make_wrapper_subclass(
            cls, inside.shape, dtype=inside.dtype, device=inside.device
        )
        made.inside = inside
        return made

    @classmethod
    def of(cls, values: Tensor) -> Nested:
        return cls(Codes.of(values))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inside"], "nested"

    def values(self) -> Tensor:
        return self.inside.values()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = tree_map(lambda each: each.inside if isinstance(each, cls) else each, args)
        found = func(*given, **(kwargs or {}))
        return cls(found) if isinstance(found, Codes) else found


class Packed(nn.Parameter):
    """A parameter that has its scales beside it, as an attribute."""

    scale: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Packed:
        codes = Codes.of(values)
        made = torch.Tensor._make_subclass(cls, codes.codes, False)
        made.scale = codes.scale
        return made

    @staticmethod
    def leaves(module: nn.Module, parameter: Any) -> dict[str, Tensor]:
        return {"": parameter, "scale": parameter.scale}


class Wrapping(nn.Module):
    """A layer with a frozen weight of codes, and an adapter that is trained beside it."""

    def __init__(self, width: int, kind: Any = Codes) -> None:
        super().__init__()
        weight = kind.of(torch.randn(width, width) / width**0.5)
        self.weight = weight if kind is Packed else nn.Parameter(weight, requires_grad=False)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if isinstance(weight, Packed):
            weight = weight * weight.scale
        return torch.tanh(linear(x, weight) + self.up(self.down(x)))
