"""The optimizers whose steps are kernels: what a step of each one takes, and the step in plain torch.

An optimizer is one class here. Its `kernel` is the name under which a backend may have a kernel of its own,
and `constants` are what such a kernel computes with, in the order in which it takes them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from accelz.dynamic_map import BLOCK, SIGNED, UNSIGNED, DynamicMap


@dataclass(frozen=True, kw_only=True, slots=True)
class Update(ABC):
    """One step of one flat shard. All tensors are on one device.

    master: (n,) fp32, updated in place (the reference takes fp64 as well); or (n,) int16, the remainders of
    masters whose rounding `weights` has: see `joined_master`.
    grad: (n,) fp32, bf16 or fp16, read only and never widened as a whole.
    maximize: step along the gradient, not against it.
    grad_scale: 0-dim fp32 by which the gradient is multiplied (averaging, unscaling, clipping).
    skip: 0-dim fp32; 1 leaves everything unchanged.
    weights: (n,) 16-bit copy of master, written (on a skipped step they hold that copy already and need not
    be written). Beside remainders they are bf16, and read too.
    step: 0-dim fp32, the number of this step, counted from 1; only for optimizers that count.
    stochastic: round moments in bf16 up or down at random, each with the probability that keeps the mean
    (Gupta et al., 2015, arXiv:1502.02551), by `noise_of`; else to the nearest, ties to even.
    scales: for moments in 8 bits one tensor each, (ceil(n / 256),) fp32, updated with their codes.
    rates: (2,) fp32, contiguous; `lr` and `decay` as a captured step (`Streams.capture`) finds them at each
    replay, in place of these two numbers. The results have the same bits. Not with an fp64 master.
    Raises ValueError for codes without scales that fit them, for scales without codes, for remainders without
    weights that fit them, and for other rates.
    """

    kernel: ClassVar[str]
    moment_names: ClassVar[tuple[str, ...]] = ()
    """The fields that hold the optimizer's state, each (n,) and updated in place: fp32 (the reference takes
    fp64 as well), or all bf16 or all uint8, which are computed with in fp32 and rounded once. In uint8 they
    are codes of `maps`, block by block, and the new scales are those of the new values."""
    never_negative: ClassVar[tuple[str, ...]] = ()
    """Moments that are sums of squares."""
    counts: ClassVar[bool] = False
    """Whether a step needs its number."""

    master: Tensor
    grad: Tensor
    lr: float
    weight_decay: float
    maximize: bool = False
    grad_scale: Tensor | None = None
    skip: Tensor | None = None
    weights: Tensor | None = None
    step: Tensor | None = None
    stochastic: bool = False
    scales: tuple[Tensor, ...] = ()
    rates: Tensor | None = None

    def __post_init__(self) -> None:
        if self.rates is not None:
            _check_rates(self.rates, self.master)
        if self.is_split:
            _check_weights(self.weights, self.master)
        if not self.scales and all(moment.dtype is not torch.uint8 for moment in self.moments):
            return
        blocks = -(-self.master.numel() // BLOCK)
        moments = [moment.dtype for moment in self.moments]
        scales = [(scale.numel(), scale.dtype) for scale in self.scales]
        if moments != [torch.uint8] * len(moments) or scales != [(blocks, torch.float32)] * len(moments):
            raise ValueError(
                f"expected moments that are all torch.uint8, each with {blocks} scales in torch.float32 in "
                f"`scales`, one for {BLOCK} elements; got moments in {moments}, and scales {scales}"
            )

    @property
    def is_split(self) -> bool:
        """Whether `master` has remainders, to be read and written together with `weights`."""
        return self.master.dtype is REMAINDER

    @property
    def decay(self) -> float:
        """The factor on master by which weights decay."""
        return 1.0

    def lr_and_decay(self) -> tuple[float | Tensor, float | Tensor]:
        """What the references take for these two: numbers, or 0-dim where a replay may find others."""
        return (self.lr, self.decay) if self.rates is None else (self.rates[0], self.rates[1])

    @property
    def l2(self) -> float:
        """The part of master that is added to the gradient, by which weights decay."""
        return self.weight_decay

    @property
    def constants(self) -> tuple[float, ...]:
        """At most 8 numbers that differ from optimizer to optimizer."""
        return ()

    @property
    def moments(self) -> tuple[Tensor, ...]:
        """The optimizer's state, in the order of `moment_names`."""
        return tuple(map(self.__getattribute__, self.moment_names))

    @classmethod
    def maps(cls) -> tuple[DynamicMap, ...]:
        """Return the maps that the codes of moments in 8 bits are of."""
        return tuple(UNSIGNED if name in cls.never_negative else SIGNED for name in cls.moment_names)

    def wide_moments(self) -> tuple[Tensor, ...]:
        """Return the moments in the master's precision."""
        moments = self.moments
        if self.scales:
            coded = zip(self.maps(), moments, self.scales, strict=True)
            moments = tuple(each.decode(codes, scales) for each, codes, scales in coded)
        return tuple(moment.to(self.master.dtype) for moment in moments)

    @abstractmethod
    def reference(self, chunk: int) -> None:
        """Make the step in plain torch, `chunk` elements at a time, which bounds its scratch memory."""

    def chunks(self, numel: int) -> Iterator[Self]:
        """Yield the updates of successive `numel` elements, the last one of what is left. With moments in 8
        bits, of so many whole blocks. Split masters are joined, and split again once the part is stepped."""
        flat = {name: getattr(self, name) for name in ("master", "grad", "weights", *self.moment_names)}
        blocks = max(numel // BLOCK, 1)
        numel = blocks * BLOCK if self.scales else numel
        for turn, start in enumerate(range(0, self.master.numel(), numel)):
            part = slice(start, start + numel)
            parts = {name: value[part] for name, value in flat.items() if value is not None}
            scales = tuple(each[turn * blocks : (turn + 1) * blocks] for each in self.scales)
            update = replace(self, **parts, scales=scales)
            if not update.is_split:
                yield update
                continue
            assert update.weights is not None
            wide = joined_master(update.weights, update.master)
            yield replace(update, master=wide, weights=None)
            for target, value in zip((update.weights, update.master), split_master(wide), strict=True):
                target.copy_(value if self.skip is None else torch.where(self.skip.bool(), target, value))

    def gradient(self) -> Tensor:
        """Return the gradient to descend along: scaled, signed and with `l2`, in the master's precision."""
        g = self.grad.to(self.master.dtype)
        g = g if self.grad_scale is None else g * self.grad_scale
        g = g.neg() if self.maximize else g
        return g.add(self.master, alpha=self.l2) if self.l2 else g

    def write(self, master: Tensor, *moments: Tensor) -> None:
        """Write the new master and moments, unless the step is to be skipped; then the weights."""
        targets = (self.master, *self.moments, *self.scales)
        values = (master, *self._as_kept(master, moments))
        for target, value in zip(targets, values, strict=True):
            target.copy_(value if self.skip is None else torch.where(self.skip.bool(), target, value))
        if self.weights is not None:
            self.weights.copy_(self.master)

    def _as_kept(self, master: Tensor, moments: Sequence[Tensor]) -> list[Tensor]:
        """Return new moments in the dtypes in which they are kept; of those in 8 bits, then the scales.
        master: the new one."""
        if self.scales:
            return self._coded(moments)
        dtypes = [moment.dtype for moment in self.moments]
        if not self.stochastic or torch.bfloat16 not in dtypes:
            return [moment.to(dtype) for moment, dtype in zip(moments, dtypes, strict=True)]
        kept = [torch.empty_like(moment, dtype=torch.bfloat16) for moment in moments]
        quarter = max(master.numel() // 4, 1)  # bounds the scratch memory
        for part in (slice(start, start + quarter) for start in range(0, master.numel(), quarter)):
            noise = noise_of(moments[0][part].float(), master[part].float(), self.step)
            for narrow, moment in zip(kept, moments, strict=True):
                value = moment[part].float()
                rounded = (noise + value.view(torch.int32)).bitwise_and_(~_BELOW_BF16).view(torch.float32)
                narrow[part] = torch.where(value.isfinite(), rounded, value)
        return kept

    def _coded(self, moments: Sequence[Tensor]) -> list[Tensor]:
        """Return the codes of new moments, then their scales."""
        codes, scales = ([torch.empty_like(old) for old in olds] for olds in (self.moments, self.scales))
        blocks = max(self.master.numel() // (4 * BLOCK), 1)  # at a time, which bounds the scratch memory
        for start in range(0, -(-self.master.numel() // BLOCK), blocks):
            rows, part = slice(start, start + blocks), slice(start * BLOCK, (start + blocks) * BLOCK)
            for index, each in enumerate(self.maps()):
                codes[index][part], scales[index][rows] = each.encode(moments[index][part].float())
        return [*codes, *scales]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWUpdate(Update):
    """A step of AdamW (Loshchilov & Hutter, 2019), or without `decoupled` of Adam (Kingma & Ba, 2015).

    decoupled: whether weights decay by themselves; else by their part in the gradient.
    """

    kernel = "adamw"
    moment_names = ("exp_avg", "exp_avg_sq")
    never_negative = ("exp_avg_sq",)
    counts = True

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    beta1: float
    beta2: float
    eps: float
    decoupled: bool = True

    @property
    def decay(self) -> float:
        return 1 - self.lr * self.weight_decay if self.decoupled else 1.0

    @property
    def l2(self) -> float:
        return 0.0 if self.decoupled else self.weight_decay

    @property
    def constants(self) -> tuple[float, ...]:
        """beta1, 1 - beta1, log(beta1), the same of beta2, eps."""
        first, second = self.beta1, self.beta2
        return first, 1 - first, _log(first), second, 1 - second, _log(second), self.eps

    def bias_corrections(self) -> tuple[Tensor, Tensor]:
        """1 - beta ** step, accurate in fp32 and without waiting for the device; of beta2, its root."""
        first, second = (-torch.expm1(self.step * _log(beta)) for beta in (self.beta1, self.beta2))
        return first, second.sqrt()

    def reference(self, chunk: int) -> None:
        first, root = self.bias_corrections()
        lr, decay = self.lr_and_decay()
        step_size = first.reciprocal() * lr
        for u in self.chunks(chunk):
            g = u.gradient()
            m, v = u.wide_moments()
            m = torch.lerp(m, g, 1 - u.beta1)
            v = (v * u.beta2).addcmul_(g, g, value=1 - u.beta2)
            u.write((u.master * decay).sub_(m / (v.sqrt() / root).add_(u.eps) * step_size), m, v)
            del g, m, v  # or they would be there beside the next elements'


@dataclass(frozen=True, kw_only=True, slots=True)
class SgdUpdate(Update):
    """A step of stochastic gradient descent without momentum."""

    kernel = "sgd"

    def reference(self, chunk: int) -> None:
        lr, _ = self.lr_and_decay()
        for u in self.chunks(chunk):
            u.write(_minus(u.master, lr, u.gradient()))


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentumUpdate(Update):
    """A step of torch.optim.SGD with momentum (Sutskever et al., 2013), without dampening.

    momentum_buffer: zero before the first step.
    """

    kernel = "momentum"
    moment_names = ("momentum_buffer",)

    momentum_buffer: Tensor
    momentum: float
    nesterov: bool = False

    @property
    def constants(self) -> tuple[float, ...]:
        """momentum, and 1 with nesterov or 0."""
        return self.momentum, float(self.nesterov)

    def reference(self, chunk: int) -> None:
        lr, _ = self.lr_and_decay()
        for u in self.chunks(chunk):
            g = u.gradient()
            (m,) = u.wide_moments()
            m = m * u.momentum + g
            u.write(_minus(u.master, lr, g.add(m, alpha=u.momentum) if u.nesterov else m), m)


@dataclass(frozen=True, kw_only=True, slots=True)
class LionUpdate(Update):
    """A step of Lion (Chen et al., 2023, arXiv:2302.06675): by lr against the sign of
    beta1 × exp_avg + (1 - beta1) × gradient. Weights decay by themselves."""

    kernel = "lion"
    moment_names = ("exp_avg",)

    exp_avg: Tensor
    beta1: float
    beta2: float

    @property
    def decay(self) -> float:
        return 1 - self.lr * self.weight_decay

    @property
    def l2(self) -> float:
        return 0.0

    @property
    def constants(self) -> tuple[float, ...]:
        """1 - beta1, 1 - beta2."""
        return 1 - self.beta1, 1 - self.beta2

    def reference(self, chunk: int) -> None:
        lr, decay = self.lr_and_decay()
        for u in self.chunks(chunk):
            g = u.gradient()
            (m,) = u.wide_moments()
            direction = torch.lerp(m, g, 1 - u.beta1).sign_()
            u.write(_minus(u.master * decay, lr, direction), torch.lerp(m, g, 1 - u.beta2))


UPDATES: dict[str, type[Update]] = {
    kind.kernel: kind for kind in (AdamWUpdate, SgdUpdate, MomentumUpdate, LionUpdate)
}
"""Every optimizer, by the name of its kernel."""

REMAINDER = torch.int16
"""The dtype of what bf16 weights lack of their fp32 masters."""

_BELOW_BF16 = 0xFFFF
"""The bits of an fp32 that bf16 lacks."""


def noise_of(moment: Tensor, master: Tensor, step: Tensor | None) -> Tensor:
    """Return what is added to the bits of all moments before those that bf16 lacks are dropped: (n,) int32,
    evenly spread over 0 to 65535.

    It is a hash (the last part of MurmurHash3, by Appleby, 2016) of the bits of the new first moment, the new
    master and the step's number. So it takes no state and no seed, and is the same whatever rank, slice,
    tier or kernel an element is stepped in. moment, master: fp32. step: 0-dim fp32; None counts as 0.
    """
    number = 0 if step is None else step.view(torch.int32) * _signed(0x85EBCA77)
    h = (master.view(torch.int32) * _signed(0x9E3779B1)).add_(moment.view(torch.int32)).add_(number)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = h.bitwise_xor_((h >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor))
    return h.bitwise_right_shift_(16).bitwise_and_(_BELOW_BF16)


def joined_master(weights: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 masters, (n,), whose bf16 rounding is `weights`: their bits are those of the weight as
    fp32, plus the remainder.

    weights: (n,) bf16. remainder: (n,) int16, by `split_master`. Any other finite weight gives a value that
    rounds to it or, halfway to a neighbour, to that one: what is left of a remainder does not harm weights
    that were overwritten. At a weight of zero only positive remainders count.
    """
    upper = weights.view(torch.int16)
    is_zero = (upper & 0x7FFF) == 0  # as bits: the host may take denormals for zero
    rest = torch.where(is_zero, remainder.clamp(min=0), remainder).to(torch.int32)
    return upper.to(torch.int32).bitwise_left_shift_(16).add_(rest).view(torch.float32)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 masters, (n,), as bf16 weights and int16 remainders, which `joined_master` puts together.

    The weights are rounded to the nearest, ties to even. Of a tie that is rounded down the remainder
    would be 2**15, which int16 lacks: it is 2**15 - 1, and the master one unit in the last place nearer to
    zero. That is one in 131,072 values of random bits, and one in 16 that come from fp16. All others are
    kept, bit for bit; a NaN stays one.
    """
    bits = master.view(torch.int32)
    bits = bits - (bits & 0x1FFFF).eq(0x8000).to(torch.int32)
    return bits.view(torch.float32).to(torch.bfloat16), bits.to(REMAINDER)


def _check_weights(weights: Tensor | None, remainder: Tensor) -> None:
    if weights is None or (weights.dtype, weights.shape) != (torch.bfloat16, remainder.shape):
        found = "none" if weights is None else f"{weights.dtype} of shape {tuple(weights.shape)}"
        raise ValueError(
            f"expected, beside a master in {REMAINDER}, `weights` in torch.bfloat16 of its shape "
            f"{tuple(remainder.shape)}: the master is the remainder of these; got {found}"
        )


def _check_rates(rates: Tensor, master: Tensor) -> None:
    found = rates.shape, rates.dtype, rates.is_contiguous(), master.dtype is torch.float64
    if found != ((2,), torch.float32, True, False):
        raise ValueError(
            "expected contiguous rates of shape (2,) in torch.float32, for lr and decay, and a master not in "
            f"torch.float64; got {rates.dtype} of shape {tuple(rates.shape)} and strides {rates.stride()}, "
            f"and {master.dtype}"
        )


def _minus(values: Tensor, factor: float | Tensor, others: Tensor) -> Tensor:
    """values - factor * others. torch's CPU kernels round both ways alike: in between not at all, or both."""
    if isinstance(factor, Tensor):
        return values.addcmul(others, factor, value=-1)
    return values.sub(others, alpha=factor)


def _signed(bits: int) -> int:
    """Return the int32 of these 32 bits."""
    return bits - (1 << 32) if bits >> 31 else bits


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
