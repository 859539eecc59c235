"""Writes the tables of docs/parameters.md: what lies inside each type that the tests train.

`python -m tests.frameworks.quantised_table` writes them, in the environment of the frameworks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from tests.frameworks import quantised_runs, test_float8_training, test_low_bit_optimizers
from zero.optimizer.piece_state import tensors_beside
from zero.optimizer.wrapped_state import inner_tensors, is_wrapper
from zero.sharding.distributed import trained_inside
from zero.sharding.forms import inner_leaves
from zero.sharding.own_codes import code_dtype

PAGE = Path(__file__).parents[2] / "docs" / "parameters.md"


def written(page: str) -> str:
    """The page with its tables as they should be."""
    tables = {
        "| weight | inner tensors | bits per value |": frozen(),
        "| trained weight | inner tensor | travels in |": trained(),
        "| optimizer | state of a matrix | bits per value |": optimizers(),
    }
    for head, rows in tables.items():
        table = "\n".join([head, "| --- | --- | --- |", *(f"| {' | '.join(row)} |" for row in rows)])
        page, count = re.subn(rf"{re.escape(head)}\n(\|.*\n)+", lambda _, new=table: new + "\n", page)
        assert count == 1, head
    return page


def frozen() -> Iterator[tuple[str, ...]]:
    for kind in quantised_runs.MADE:
        (leaves, *_) = inner_leaves(quantised_runs.built(kind)).values()
        names = [f"`{name}`" if name else "the weight" for name in leaves]
        nbytes = sum(leaf.nbytes for leaf in leaves.values())
        yield kind, ", ".join(names), _bits(nbytes, quantised_runs.WIDTH**2)


def trained() -> Iterator[tuple[str, ...]]:
    for kind in test_float8_training.KINDS:
        model = test_float8_training.built(kind)
        weight = next(p for p in model.parameters() if type(p) is not nn.Parameter)
        inner = trained_inside(weight)
        assert inner is not None
        codes = code_dtype(weight)
        yield (
            f"torchao {type(weight).__name__}",
            f"`{inner[0]}`",
            "its own dtype" if codes is None else _dtype(codes),
        )


def optimizers() -> Iterator[tuple[str, ...]]:
    for kind, make in test_low_bit_optimizers.OPTIMIZERS.items():
        model = test_low_bit_optimizers.model()
        optimizer, weight = make(model), next(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with test_low_bit_optimizers.eagerly():
            optimizer.step()
        state = optimizer.state[weight]
        found = [
            (f"{name}.{key}", tensor)
            for name, value in state.items()
            for key, tensor in (inner_tensors(value) if is_wrapper(value) else {"": value}).items()
            if isinstance(tensor, torch.Tensor) and tensor.dim()
        ]
        told = ", ".join(f"`{name.rstrip('.')}` ({_dtype(tensor.dtype)})" for name, tensor in found)
        yield kind, told, _bits(sum(each.nbytes for each in tensors_beside(state, weight)), weight.numel())


def _bits(nbytes: int, values: int) -> str:
    return f"{8 * nbytes / values:.1f}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
