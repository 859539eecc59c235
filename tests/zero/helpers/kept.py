"""What one rank keeps of an engine's values, read without the other ranks: what all ranks keep is the whole.

To read whole values by name takes several collectives for each parameter, far more than the steps before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import zero
from accelz import HOST
from zero.optimizer.piece_state import in_memory_order


def kept_values(engine: zero.Engine) -> dict[str, Tensor]:
    """This rank's parts of weights, masters and optimizer state, one-dimensional, on the host.

    They are by parameter, whatever sub-groups they are in. Whole parameters' optimizers are not for this.
    """
    found: dict[str, Tensor] = {}
    for group in (group for unit in engine.units for group in unit.groups):
        for what, values in (("weight", group.shard), ("master", group.widest)):
            whole = values.to(HOST)
            parts = ((group.names[piece.index], whole[piece.shard_slice]) for piece in group.pieces)
            found |= {f"{what} of {name}": part.clone() for name, part in parts}
    return found | {key: torch.cat(parts) for key, parts in _state(engine).items()}


def _state(engine: zero.Engine) -> dict[str, list[Tensor]]:
    """The optimizer's state by key and parameter: sub-groups' parts, and counts once."""
    found: dict[str, list[Tensor]] = {}
    for stepped in engine._boundary.optimizer.subs:
        for piece in stepped.pieces:
            for key, value in engine.optimizer.state.get(piece.parameter, {}).items():
                name = f"{key} of {stepped.name_of(piece)}"
                if key == "step":
                    found[name] = [value.reshape(1).to(HOST)]
                else:
                    part = in_memory_order(value, piece.parameter).to(HOST)
                    found.setdefault(name, []).append(part)
    return found


def kept_gradients(engine: zero.Engine) -> dict[str, Tensor]:
    """This rank's parts of the gradients between backward and step, by parameter that has one on any rank.

    fp32, on the host, as `full_gradient` puts them together. Collective where there are copies of the model.
    """
    found: dict[str, Tensor] = {}
    for have in (each for each in engine._reducer.all if each.slice.present):
        group, whole = have.group, engine._reducer.summed(have).to(HOST).float()
        for piece in (piece for piece in group.pieces if piece.index in have.used):
            factors = engine._held_gradients.factors_of(group.parameters[piece.index])
            name = group.names[piece.index]
            found[f"gradient of {name}"] = _product(whole[piece.shard_slice], factors)
    return found


def _product(values: Tensor, factors: Iterable[Any]) -> Tensor:
    values = values.clone()
    for factor in factors:
        values.mul_(factor.to(HOST) if isinstance(factor, Tensor) else factor)
    return values


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """The names of what has other bits in two runs, or is there in one only."""
    both = one.keys() & other.keys()
    return sorted(one.keys() ^ other.keys()) + [name for name in both if not _same(one[name], other[name])]


def _same(one: Tensor, other: Tensor) -> bool:
    alike = one.dtype is other.dtype and one.shape == other.shape
    return alike and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
