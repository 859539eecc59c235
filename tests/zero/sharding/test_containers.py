"""Containers that a forward receives keep their types, and everything else that they have."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from zero.sharding.tensors import iter_tensors, map_tensors

Pair = namedtuple("Pair", "first second")


class Row(tuple[Any, ...]):
    """A tuple with a `__dict__`."""


class Rows(list[Any]):
    pass


@dataclasses.dataclass
class Batch:
    x: Tensor
    mask: Tensor | None = dataclasses.field(init=False, default=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor


def half(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


def whole() -> Tensor:
    return torch.ones(2)


CONTAINERS = {
    "tuple": lambda: (whole(), 1),
    "named tuple": lambda: Pair(whole(), 1),
    "a tuple of one's own": lambda: Row([whole(), 1]),
    "torch's": lambda: torch.max(torch.ones(2, 2), 0),
    "list": lambda: [whole(), [1]],
    "a list of one's own": lambda: Rows([whole()]),
    "dict": lambda: {"x": whole(), "y": 1},
    "ordered": lambda: OrderedDict(x=whole()),
    "with defaults": lambda: defaultdict(int, x=whole()),
    "UserDict": lambda: UserDict(x=whole()),
    "read-only": lambda: MappingProxyType({"x": whole()}),
    "dataclass": lambda: Batch(whole()),
    "frozen": lambda: Frozen(whole()),
    "nested": lambda: {"x": [Pair(Batch(whole()), 1)]},
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_types_stay(name: str) -> None:
    value = CONTAINERS[name]()
    mapped = map_tensors(half, value)
    assert type(mapped) is type(value)
    assert [t.dtype for t in iter_tensors(mapped) if t.is_floating_point()] == [torch.float16]
    assert [t.dtype for t in iter_tensors(value) if t.is_floating_point()] == [torch.float32]  # as it was
    assert map_tensors(half, mapped) is mapped


def test_what_else_they_have_stays() -> None:
    batch = Batch(whole())
    batch.mask = torch.zeros(2, dtype=torch.long)
    batch.name = "train"  # type: ignore[attr-defined]
    mapped = map_tensors(half, batch)
    assert mapped.mask is batch.mask
    assert mapped.name == "train"
    row = Row([whole()])
    row.name = "row"  # type: ignore[attr-defined]
    assert map_tensors(half, row).name == "row"
    assert map_tensors(half, defaultdict(int, x=whole()))["absent"] == 0


class MadeWhenAsked(Mapping[int, Any]):
    """Its values are new objects each time, which nothing else holds."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __getitem__(self, key: int) -> Any:
        return MadeWhenAsked(self._depth - 1) if self._depth else [whole()]


def test_values_that_are_made_when_they_are_asked_for() -> None:
    """One that is freed leaves its id to the next, which is another object."""
    assert len(list(iter_tensors(MadeWhenAsked(2)))) == 27
