"""Sequences divided over ranks, each having consecutive tokens, and the loss over all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

import accelz
from zero.errors import UsageError

IGNORED = -100
"""The label of a token that has none, as in torch and transformers."""
TIMEOUT = 600.0
"""Seconds after which a collective fails, as `Config.timeout` has it by default."""


def split(whole: Tensor, group: ProcessGroup, dim: int = 1) -> Tensor:
    """This rank's slice of a tensor along its tokens' dimension: (batch, S, ...) gives (batch, S / n, ...).

    Raises UsageError if the group's n ranks do not divide the S tokens.
    """
    length, ranks = whole.shape[dim], group.size()
    if length % ranks:
        raise UsageError(
            f"{length} tokens cannot be divided evenly over {ranks} ranks: pad sequences to a multiple of "
            f"{ranks}, with labels of {IGNORED}"
        )
    return whole.narrow(dim, group.rank() * (length // ranks), length // ranks)


def split_batch(batch: Mapping[str, Tensor], group: ProcessGroup) -> tuple[dict[str, Tensor], Tensor | None]:
    """This rank's part of a batch for a causal language model, as transformers' models take it.

    batch: the same on all ranks of the group; tensors of (batch, S, ...). Returns the model's arguments and
    the labels of this rank's tokens, (batch, S / n), for `cross_entropy`: each token's is the one after it,
    also where another rank has that. The arguments have `position_ids`, which count from the beginning of the
    whole sequence; `attention_mask` stays whole, as `ulysses.set_attention` takes it.

    Raises UsageError if sequences cannot be divided, or start anew within a row; padding, where the mask of
    (batch, S) is 0, may have any position.
    """
    if "position_ids" in batch and not _consecutive(batch["position_ids"], batch.get("attention_mask")):
        raise UsageError(
            "position_ids begin anew within a row, as packed sequences do, and attention over divided "
            "sequences does not tell them apart: give each sequence a row of its own"
        )
    labels = batch.get("labels")
    given = {name: tensor for name, tensor in batch.items() if name not in ("labels", "attention_mask")}
    if "position_ids" not in given and given:
        rows, length = next(iter(given.values())).shape[:2]
        device = next(iter(given.values())).device
        given["position_ids"] = torch.arange(length, device=device).expand(rows, length)
    found = {name: split(tensor, group) for name, tensor in given.items()}
    if "attention_mask" in batch:
        found["attention_mask"] = batch["attention_mask"]
    return found, None if labels is None else split(F.pad(labels[:, 1:], (0, 1), value=IGNORED), group)


def _consecutive(positions: Tensor, mask: Tensor | None) -> bool:
    """Whether neighbours that are no padding are one apart, and none begins anew behind padding."""
    follows = positions.diff(dim=-1) == 1
    if mask is not None and mask.dim() == 2:
        kept = mask.bool()
        furthest = torch.where(kept, positions, -1).cummax(-1).values
        after_padding = ~kept[:, :-1] & (positions[..., 1:] > furthest[..., :-1])
        follows = follows | after_padding | ~kept[:, 1:]
    return bool(follows.all())


def cross_entropy(logits: Tensor, labels: Tensor, group: ProcessGroup, ignore_index: int = IGNORED) -> Tensor:
    """The mean cross entropy over the labels that the group's ranks have together; collective.

    logits: (..., vocabulary). labels: (...), of this rank's tokens, unlike in number on each rank. The value
    is the same on all ranks, and NaN if no rank has a label. Gradients are those of `mean`.
    """
    flat = labels.reshape(-1)
    losses = F.cross_entropy(
        logits.reshape(flat.numel(), -1).float(), flat, ignore_index=ignore_index, reduction="sum"
    )
    return mean(losses, (flat != ignore_index).sum(), group)


def mean(total: Tensor, count: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of all ranks' `total`s, divided by that of their `count`s; collective. Scalars.

    The value is the same on all ranks. Its gradient is that of this rank's total times the number of ranks,
    so that gradients averaged over the ranks, as the engine does it, are those of one process. The group says
    what the mean is over: with one row's ranks ("cp"), rows count alike, however many labels they have; with
    the ranks of all rows (both "dp" and "cp"), labels do.
    """
    found: Tensor = untraced(_Mean.apply, total, count, group)
    return found


def untraced(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call something outside of the graphs that `torch.compile` makes: accelz' collectives are not traced."""
    return (torch.compiler.disable(call) if torch.compiler.is_compiling() else call)(*arguments)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, group: ProcessGroup) -> Tensor:
        dtype = torch.promote_types(total.dtype, torch.float32)
        both = torch.stack([total.to(dtype), count.to(dtype)])
        accelz.current().collectives.all_reduce(both, accelz.Group.of(group, TIMEOUT))
        ctx.factor = group.size() / both[1]
        return (both[0] / both[1]).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (gradient * ctx.factor).to(gradient.dtype), None, None
