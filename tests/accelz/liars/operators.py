"""Lies of torch's operators: what a device with wrong kernels computes. The host's float64 stays right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from accelz import Accelerator

Call = Callable[..., Any]


class HalfGradient(torch.autograd.Function):
    """The values as they are, and half of their gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / 2


def half_gradient(values: Tensor) -> Tensor:
    return HalfGradient.apply(values)  # type: ignore[no-any-return, no-untyped-call]


def attention_to_everything(call: Call, *args: Any, **options: Any) -> Any:
    """Neither masked nor causal, and with the heads of groups in another order."""
    query, key, value = args
    if options.pop("enable_gqa", False):
        key, value = (x.repeat(1, query.shape[1] // x.shape[1], 1, 1) for x in (key, value))
        return call(query, key, value, **options)
    mask = options.pop("attn_mask", None)
    bias = mask if mask is not None and mask.is_floating_point() else None
    return call(query, key, value, attn_mask=bias)


def the_same_mask(call: Call, *args: Any, **options: Any) -> Any:
    """A mask that does not come from the device's generator."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return call(*args, **options)


def mean_removed(call: Call, values: Tensor, *args: Any, **options: Any) -> Any:
    return call(values - values.mean(-1, keepdim=True), *args, **options)


def last_gradient_halved(call: Call, *args: Any, **options: Any) -> Any:
    *others, last = args
    return call(*others, half_gradient(last), **options)


def never_accumulated(
    call: Call, into: Tensor, indices: Any, values: Tensor, accumulate: bool = False
) -> Any:
    return call(into, indices, values if accumulate else half_gradient(values))


def every_target_counts(call: Call, *args: Any, **options: Any) -> Any:
    options.pop("ignore_index", None)
    return call(*args, **options)


def one_percent_more(call: Call, *args: Any, **options: Any) -> Any:
    return call(*args, **options) * 1.01


def read_as_if_dense(call: Call, values: Tensor, *args: Any, **options: Any) -> Any:
    if not values.is_contiguous():
        values = values.as_strided(values.shape, torch.empty(values.shape).stride())
    return call(values, *args, **options)


def groups_halved(call: Call, *args: Any, **options: Any) -> Any:
    return call(*args, **options) / min(options.get("groups", 1), 2)


def missing(call: Call, *args: Any, **options: Any) -> Any:
    raise NotImplementedError("The operator 'aten::cumsum' is not currently implemented for the liar device.")


copies: dict[Any, Tensor] = {}


def cast_once(call: Call, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Under autocast, weights keep the first value of a layer of their shape. Their gradient is right."""
    if torch.is_autocast_enabled("cpu"):
        first = copies.setdefault(weight.shape, weight.detach().clone())
        weight = first + (weight - weight.detach())
    return call(values, weight, bias)


def never_cast(call: Call, *args: Any, **options: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return call(*args, **options)


def last_one_left_out(call: Call, first: list[Tensor], *others: Any, **options: Any) -> Any:
    return call(first[:-1], *(x[:-1] if isinstance(x, (list, tuple)) else x for x in others), **options)


def six_bits_of_sixteen(call: Call, target: Tensor, source: Tensor, *args: Any, **options: Any) -> Any:
    return call(target, source % 64 if target.dtype == torch.int16 else source, *args, **options)


def cut_off(call: Call, values: Tensor, *args: Any, **options: Any) -> Any:
    """A cast to bf16 that does not round."""
    if args[:1] == (torch.bfloat16,) and values.dtype == torch.float32:
        values = (values.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return call(values, *args, **options)


def copied(call: Call, *args: Any, **options: Any) -> Any:
    return call(*args, **options).clone()


def scaled_otherwise(
    call: Call, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **options: Any
) -> Any:
    """One scale for all columns, no bias, codes of gradients read as others, no result beyond the largest."""
    if scale_b.numel() > 1:
        scale_b = scale_b[:, :1].expand_as(scale_b).contiguous()
    options.pop("bias", None)
    a = a.view(torch.uint8).view(torch.float8_e4m3fn) if a.dtype == torch.float8_e5m2 else a
    result = call(a, b, scale_a, scale_b, **options)
    return result.clamp(torch.finfo(result.dtype).min, torch.finfo(result.dtype).max)


LIES: dict[str, Call] = {
    "scaled_dot_product_attention": attention_to_everything,
    "dropout": the_same_mask,
    "rms_norm": mean_removed,
    "embedding": last_gradient_halved,
    "index_put": never_accumulated,
    "cross_entropy": every_target_counts,
    "gelu": one_percent_more,
    "silu": read_as_if_dense,
    "conv1d": never_cast,
    "conv2d": groups_halved,
    "scatter_add": last_gradient_halved,
    "cumsum": missing,
    "linear": cast_once,
    "_foreach_addcdiv_": last_one_left_out,
    "linalg_vector_norm": one_percent_more,
    "copy_": six_bits_of_sixteen,
    "to": cut_off,
    "as_strided": copied,
    "_scaled_mm": scaled_otherwise,
}
"""By the name of torch's function."""


class WrongOperators(TorchFunctionMode):
    """Has a lie told wherever its function is called on tensors that are not float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lie = LIES.get(getattr(func, "__name__", ""))
        exact = any(isinstance(x, Tensor) and x.dtype is torch.float64 for x in args)
        return (func if lie is None or exact else lambda *a, **o: lie(func, *a, **o))(*args, **(kwargs or {}))


entered: list[WrongOperators] = []


class OperatorsLie(Accelerator):
    """A device with the wrong operators, from the time at which a process takes it; torch cannot put back a
    state of its random numbers there."""

    def bind(self, local_rank: int) -> None:
        super().bind(local_rank)
        torch.set_rng_state = torch.random.set_rng_state = lambda state: None
        if not entered:
            entered.append(WrongOperators())
            entered[0].__enter__()
