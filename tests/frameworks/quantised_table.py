"""Writes tables of docs/parameters.md and docs/optimizers.md: what lies inside each type that is tested.

`python -m tests.frameworks.quantised_table` writes them, in the environment of the frameworks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.frameworks import low_bit_optimizers, quantised_runs
from zero.optimizer.piece_state import inner_tensors, is_wrapper, tensors_beside
from zero.sharding.forms import inner_leaves

PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("parameters.md", "optimizers.md")]


def written() -> dict[Path, str]:
    """The pages with their tables as they should be."""
    pages = {page: page.read_text() for page in PAGES}
    tables = {
        "| weight | inner tensors | bits per value |": frozen(),
        "| optimizer | state of a matrix | bits per value |": optimizers(),
    }
    for page, (head, rows) in zip(PAGES, tables.items(), strict=True):
        table = "\n".join([head, "| --- | --- | --- |", *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
        pages[page], count = re.subn(rf"{re.escape(head)}\n(\|.*\n)+", lambda _, new=table: new, pages[page])
        assert count == 1, head
    return pages


def frozen() -> Iterator[tuple[str, ...]]:
    for kind in quantised_runs.MADE:
        (leaves, *_) = inner_leaves(quantised_runs.built(kind)).values()
        names = [f"`{name}`" if name else "the weight" for name in leaves]
        nbytes = sum(leaf.nbytes for leaf in leaves.values())
        yield kind, ", ".join(names), _bits(nbytes, quantised_runs.WIDTH**2)


def optimizers() -> Iterator[tuple[str, ...]]:
    for kind, make in low_bit_optimizers.OPTIMIZERS.items():
        model = low_bit_optimizers.model()
        optimizer, weight = make(model), next(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with low_bit_optimizers.eagerly():
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
    for page, text in written().items():
        page.write_text(text)
