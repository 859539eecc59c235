"""Trained weights that say themselves in which codes they are gathered, by torch's `fsdp_pre_all_gather`.

torchao's weights for training in float8 do: every rank casts its slice by one scale for the whole weight, the
codes are gathered, and the layer computes with what `fsdp_post_all_gather` makes of them. Their masters, and
values that a program asks for, are as precise as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero.sharding.distributed import trained_inside
from zero.sharding.layout import Piece


def code_dtype(parameter: nn.Parameter) -> torch.dtype | None:
    """The dtype of the codes that a parameter is gathered in; None if it does not say so."""
    given: Any = parameter
    known = trained_inside(parameter) is not None and hasattr(given, "fsdp_pre_all_gather")
    return given._dtype if known and hasattr(given, "_precomputed_scale") else None


class OwnCodes:
    """Of the parameters of a group. inside: the names of the tensors that they wrap."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters: Sequence[Any] = parameters
        inside = [trained_inside(parameter) for parameter in parameters]
        self._inside = [inner for inner in inside if inner is not None]
        self._metadata: list[Any] = [None] * len(parameters)

    @torch.no_grad()
    def put(
        self, codes: Tensor, pieces: Sequence[Piece], shard: Tensor, reduce: Callable[[Tensor], None]
    ) -> None:
        """Cast a rank's shard of the group into its slice of the codes.

        reduce: makes numbers, (parameters,), the largest of all ranks; collective.
        """
        mine = {piece.index: (piece, shard[piece.shard_slice]) for piece in pieces}
        largest = torch.zeros(len(self._parameters), dtype=shard.dtype, device=shard.device)
        for index, (_, values) in mine.items():
            largest[index] = values.abs().max()
        reduce(largest)
        to_scale = sys.modules["torchao.float8.float8_utils"].amax_to_scale
        for index, (parameter, (name, _)) in enumerate(zip(self._parameters, self._inside, strict=True)):
            piece, values = mine.get(index, (None, shard.new_zeros(1)))
            _, context = parameter.__tensor_flatten__()
            part = type(parameter).__tensor_unflatten__({name: values}, context, None, None)
            part._precomputed_scale = to_scale(largest[index], parameter._dtype)
            (made,), self._metadata[index] = part.fsdp_pre_all_gather(None)
            if piece is not None:
                codes[piece.shard_slice].copy_(made)

    def show(self, dtype: torch.dtype) -> None:
        """Let the parameters compute with the codes that the tensors inside them are views of."""
        pairs = zip(self._parameters, self._inside, self._metadata, strict=True)
        for parameter, (name, inner), metadata in pairs:
            made, _ = parameter.fsdp_post_all_gather((inner.detach(),), metadata, dtype)
            setattr(parameter, name, made)

    def hide(self) -> None:
        """Let the parameters have the tensors inside them again."""
        for parameter, (name, inner) in zip(self._parameters, self._inside, strict=True):
            setattr(parameter, name, inner)
