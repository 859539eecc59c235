"""Ulysses sequence parallelism: attention over sequences whose tokens are divided over ranks.

Before attention, an all-to-all gives each rank all tokens of some heads; after it, another gives them back.
After Jacobs et al., DeepSpeed-Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

import accelz
from zero.errors import ModelError, UsageError
from zero.parallel.tokens import TIMEOUT, untraced

_attend = F.scaled_dot_product_attention
_BACKWARDS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_RUN_GRAPH = "_engine_run_backward"  # what torch.autograd calls to run the graph


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group: ProcessGroup,
) -> Tensor:
    """torch's function of this name, for tokens divided over the group's n ranks; collective.

    query: (batch, heads, S / n, width), this rank's consecutive tokens; key, value: the same, of fewer heads
    with `enable_gqa`, which are repeated where they are fewer than ranks. attn_mask: of the whole sequence,
    (..., S, S), for all heads alike or for each. Returns (batch, heads, S / n, width).

    Raises ModelError if the ranks do not divide the heads, and UsageError for tensors of other sizes.
    """
    if query.dim() != 4:
        raise UsageError(f"expected queries of (batch, heads, tokens, width), got {tuple(query.shape)}")
    ranks, heads = group.size(), query.shape[1]
    if heads % ranks:
        raise ModelError(
            f"attention has {heads} heads, which {ranks} ranks cannot share evenly: divide sequences over a "
            f"number of ranks that divides {heads}"
        )
    if not enable_gqa and key.shape[1] != heads:
        raise UsageError(f"{heads} heads of queries and {key.shape[1]} of keys need enable_gqa=True")
    repeats = ranks // math.gcd(key.shape[1], ranks)
    if repeats > 1:
        key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
    query, key, value = _to_heads((query, key, value), group)
    if attn_mask is not None:
        attn_mask = _mask_of_heads(attn_mask, heads, query.shape[2], key.shape[2], group)
    found = _attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return _to_tokens(found, group)


def _mask_of_heads(mask: Tensor, heads: int, queries: int, keys: int, group: ProcessGroup) -> Tensor:
    sizes = [(queries, 1), (keys, 1)]
    if mask.dim() < 2 or any(n not in fits for n, fits in zip(mask.shape[-2:], sizes, strict=True)):
        raise UsageError(
            f"an attention mask of shape {tuple(mask.shape)} does not fit the whole sequence of {queries} "
            f"queries and {keys} keys: give masks of all tokens, not of this rank's"
        )
    each = heads // group.size()
    divided = mask.dim() > 2 and mask.shape[-3] == heads > 1
    return mask.narrow(-3, group.rank() * each, each) if divided else mask


class Attention(TorchFunctionMode):
    """In the block, `torch.nn.functional.scaled_dot_product_attention` is that of divided sequences.

    Open it around the backward as well if activations are recomputed. Raises ModelError where
    `nn.MultiheadAttention` is called.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _attend:
            return scaled_dot_product_attention(*args, **(kwargs or {}), group=self._group)
        if func is F.multi_head_attention_forward:
            raise ModelError(
                "nn.MultiheadAttention attends to this rank's tokens only: use a layer that calls "
                "torch.nn.functional.scaled_dot_product_attention"
            )
        if func in _BACKWARDS:
            with self._in_backward():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        """Turns the mode on again where a backward, which is a torch function itself, runs the graph: layers
        may repeat their forward there. The engine's threads have the modes of the thread that begins."""
        functions = vars(torch.autograd)
        run_graph = functions[_RUN_GRAPH]

        def run(*args: Any, **kwargs: Any) -> Any:
            functions[_RUN_GRAPH] = run_graph  # for backwards within this one, in which the mode is on
            with self:
                return run_graph(*args, **kwargs)

        functions[_RUN_GRAPH] = run
        try:
            yield
        finally:
            functions[_RUN_GRAPH] = run_graph


def set_attention(model: nn.Module, group: ProcessGroup) -> None:
    """Have a model of transformers attend to sequences divided over the group's ranks.

    Its attention becomes an implementation in transformers' `AttentionInterface`, which computes as "sdpa"
    does. Masks are made for the whole sequence: give `attention_mask` whole. The model's arguments are those
    of `tokens.split_batch`. Raises ModelError for a model whose implementation cannot be set.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"ulysses_{group.group_name}"
    AttentionInterface.register(name, _attention_of_transformers(group))
    AttentionMaskInterface.register(name, _mask_of_transformers(group))
    set_to: Callable[[str], None] | None = getattr(model, "set_attn_implementation", None)
    if set_to is not None:
        set_to(name)
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != name:
        raise ModelError(
            f"{type(model).__name__} does not take attention from transformers' AttentionInterface: wrap its "
            "forward in ulysses.Attention(group)"
        )


def _attention_of_transformers(group: ProcessGroup) -> Callable[..., Any]:
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        for option in ("softcap", "position_bias", "s_aux"):
            if options.get(option) is not None:
                raise ModelError(f"{type(module).__name__} has {option!r}, which Ulysses does not compute")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        found = scaled_dot_product_attention(
            query,
            key,
            value,
            attention_mask,
            dropout,
            bool(causal) and attention_mask is None,
            scaling,
            enable_gqa=key.shape[1] != query.shape[1],
            group=group,
        )
        return found.transpose(1, 2).contiguous(), None

    return attend


def _mask_of_transformers(group: ProcessGroup) -> Callable[..., Any]:
    from transformers.masking_utils import sdpa_mask

    def mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Any:
        whole = group.size() * q_length
        if kv_length not in (q_length, whole):
            raise UsageError(
                f"{q_length} tokens attend to {kv_length}, as with a cache or the mask of a part: give "
                f"attention_mask for all {whole} tokens of the sequence, and no cache"
            )
        return sdpa_mask(batch_size, whole, whole, *args, **kwargs)

    return mask


def _to_heads(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Each (batch, heads, S / n, width) becomes (batch, heads / n, S, width)."""
    ranks = group.size()
    parts = [each.unflatten(1, (ranks, -1)).movedim(1, 0) for each in tensors]
    if len({part.dtype for part in parts}) == 1:  # one exchange for all
        sent = torch.cat([part.reshape(ranks, -1) for part in parts], 1)
        sizes = [part[0].numel() for part in parts]
        received = _exchange(sent, group).split(sizes, 1)
    else:
        received = tuple(_exchange(part.reshape(ranks, -1), group) for part in parts)
    return [r.view(p.shape).movedim(0, 2).flatten(2, 3) for r, p in zip(received, parts, strict=True)]


def _to_tokens(whole: Tensor, group: ProcessGroup) -> Tensor:
    """(batch, heads / n, S, width) becomes (batch, heads, S / n, width)."""
    parts = whole.unflatten(2, (group.size(), -1)).movedim(2, 0)
    return _exchange(parts.contiguous(), group).movedim(0, 1).flatten(1, 2)


def _exchange(parts: Tensor, group: ProcessGroup) -> Tensor:
    found: Tensor = untraced(_Exchange.apply, parts, group)
    return found


class _Exchange(torch.autograd.Function):
    """Part r of (n, ...) goes to rank r; what rank r has sent takes its place. The backward is another."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        counts = [sent.numel() // group.size()] * group.size()
        accelz.current().collectives.all_to_all(
            received.view(-1), sent.view(-1), counts, counts, accelz.Group.of(group, TIMEOUT)
        )
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.group), None
