"""Marks that tie a test to methods of the interface and to capabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelz.capabilities import COMPILATIONS, SCALINGS, Capabilities, Compilation, Scaling

about = pytest.mark.accelz_about
proves = pytest.mark.accelz_proves
needs = pytest.mark.accelz_needs
tier = pytest.mark.accelz_tier
thorough = pytest.mark.accelz_thorough

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the kit tries; a device may declare others."""

WITH_DUTIES = frozenset({"streams", "lazy_graph", "exact_memory", "graph_capture"})
"""Capabilities that oblige a backend to more than what the test that proves them asks: the kit advises nobody
to declare them."""


def names(item: pytest.Item, marker: str) -> tuple[str, ...]:
    """The arguments of all marks of this name on a test."""
    return tuple(name for mark in item.iter_markers(marker) for name in mark.args)


def subjects(item: pytest.Item) -> tuple[str, ...]:
    """The capabilities that a test's failure counts against: the first that each `needs` names."""
    return tuple(mark.args[0] for mark in item.iter_markers("accelz_needs"))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of the capability "the device supports this dtype"."""
    return f"dtype {str(dtype).removeprefix('torch.')}"


def compile_name(how: Compilation) -> str:
    """The name of the capability "torch.compile does at least this much"."""
    return f"compile {how}"


def scaled_mm_name(how: Scaling) -> str:
    """The name of the capability "products in 8 bits may have at least these scales"."""
    return f"scaled_mm {how}"


def declares(capabilities: Capabilities, name: str) -> bool:
    """Whether a capability is declared; `name` is a flag's name, or of a kind that has a function above."""
    if name in capabilities.flags():
        return capabilities.flags()[name]
    for how in COMPILATIONS[1:]:
        if name == compile_name(how):
            return capabilities.compiles(how)
    for scaling in SCALINGS[1:]:
        if name == scaled_mm_name(scaling):
            return capabilities.scales(scaling)
    return any(name == dtype_name(dtype) for dtype in capabilities.dtypes)


def not_to_declare(name: str) -> str:
    """What to write in place of a capability that does not hold, or "" for float32, which has to."""
    kind, _, value = name.partition(" ")
    if kind == "compile":
        return f"declare compile={COMPILATIONS[COMPILATIONS.index(value) - 1]!r}"
    if kind == "scaled_mm":
        return f"declare scaled_mm={SCALINGS[SCALINGS.index(value) - 1]!r}"
    if kind == "dtype":
        return "" if value == "float32" else f"leave torch.{value} out of dtypes"
    return f"declare {name}=False"


def every_capability(capabilities: Capabilities) -> list[str]:
    """The names of all capabilities, in the order of the report."""
    extra = sorted(dtype_name(d) for d in capabilities.dtypes if d not in FLOATS)
    ordered = (*map(compile_name, COMPILATIONS[1:]), *map(scaled_mm_name, SCALINGS[1:]))
    return [*capabilities.flags(), *ordered, *map(dtype_name, FLOATS), *extra]


def over_dtypes(*dtypes: torch.dtype) -> pytest.MarkDecorator:
    """Parametrise a test over dtypes, by default FLOATS. Undeclared floating-point ones are skipped."""
    return pytest.mark.parametrize("dtype", [_case(dtype) for dtype in dtypes or FLOATS])


def _case(dtype: torch.dtype) -> Any:
    marks = [needs(dtype_name(dtype))] if dtype.is_floating_point else []
    return pytest.param(dtype, id=str(dtype).removeprefix("torch."), marks=marks)
