"""DeepSpeed's learning rate schedules, by DeepSpeed's names and parameters, as schedulers of torch.

`n` is how often the scheduler has stepped: 0 in the first optimizer step. The rates are those of DeepSpeed
0.19 in every step, its peculiarities included: schedules with a warm-up stay at their first rate for two
steps, WarmupCosineLR is at 0 in the first, and OneCycle begins at cycle_min_mom and sets beta2 to 0.99.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero.errors import ConfigError

Rates = float | Sequence[float]
"""One value for all param_groups, or one for each."""
Shares = Callable[[int], tuple[float, float]]
"""The shares of two values after `n` steps: what is set is the sum."""


class _Schedule(LRScheduler):
    """Sets what depends on the number of steps only, so that a checkpoint needs no other state.

    lr, betas: two values for each of the param_groups, and their shares.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr: tuple[list[float], list[float], Shares],
        betas: tuple[list[float], list[float], Shares] | None = None,
    ) -> None:
        self._lr, self._betas = lr, betas
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """The rates after `last_epoch` steps; momentum goes with them."""
        if self._betas is not None:
            for group, beta in zip(self.optimizer.param_groups, self._mixed(*self._betas), strict=True):
                if "betas" in group:
                    group["betas"] = (beta, 0.99)
        return self._mixed(*self._lr)

    def _mixed(self, low: list[float], high: list[float], shares: Shares) -> list[float]:
        of_low, of_high = shares(self.last_epoch)
        return [of_low * a + of_high * b for a, b in zip(low, high, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key not in ("_lr", "_betas")}


def WarmupLR(
    optimizer: Optimizer,
    warmup_min_lr: Rates = 0.0,
    warmup_max_lr: Rates | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> LRScheduler:
    """From warmup_min_lr to warmup_max_lr in `warmup_num_steps` steps, then constant.

    warmup_max_lr: None is the optimizer's own rate. warmup_type: "log" or "linear".
    """
    return WarmupDecayLR(optimizer, None, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)


def WarmupDecayLR(
    optimizer: Optimizer,
    total_num_steps: int | None,
    warmup_min_lr: Rates = 0.0,
    warmup_max_lr: Rates | None = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> LRScheduler:
    """As WarmupLR, then linearly down to warmup_min_lr at step `total_num_steps`; None: never."""
    low = _each(optimizer, "warmup_min_lr", warmup_min_lr)
    high = _each(optimizer, "warmup_max_lr", warmup_max_lr)
    warm = _warm_up(warmup_num_steps, warmup_type)

    def shares(n: int) -> tuple[float, float]:
        before = max(n - 1, 0)
        if before < warmup_num_steps or total_num_steps is None:
            height = warm(before)
        else:
            height = max(0.0, (total_num_steps - before) / max(1, total_num_steps - warmup_num_steps))
        return 1 - height, height

    return _Schedule(optimizer, (low, high, shares))


def WarmupCosineLR(
    optimizer: Optimizer,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> LRScheduler:
    """A share of the optimizer's own rate: from warmup_min_ratio to 1, then along a half cosine to
    cos_min_ratio at step `total_num_steps`."""
    own, warm = _each(optimizer, "lr", None), _warm_up(warmup_num_steps, warmup_type)

    def shares(n: int) -> tuple[float, float]:
        if n == 0:
            return 0.0, 0.0
        if n <= warmup_num_steps:
            return warmup_min_ratio, (1 - warmup_min_ratio) * warm(n - 1)
        done = (n - warmup_num_steps) / max(1, total_num_steps - warmup_num_steps)
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return cos_min_ratio, (1 - cos_min_ratio) * cosine

    return _Schedule(optimizer, (own, own, shares))


def LRRangeTest(
    optimizer: Optimizer,
    lr_range_test_min_lr: Rates = 0.001,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> LRScheduler:
    """A rate that grows without end, to find the largest one that trains (Smith 2018, arXiv:1803.09820)."""
    low = _each(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)

    def shares(n: int) -> tuple[float, float]:
        intervals = n / lr_range_test_step_size
        return 1, lr_range_test_step_rate * (math.floor(intervals) if lr_range_test_staircase else intervals)

    return _Schedule(optimizer, (low, low, shares))


def OneCycle(
    optimizer: Optimizer,
    cycle_min_lr: Rates,
    cycle_max_lr: Rates,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: Rates = 0.8,
    cycle_max_mom: Rates = 0.9,
    decay_mom_rate: float = 0.0,
) -> LRScheduler:
    """Up to cycle_max_lr and down again, then a decay, with the momentum (Adam's beta1) the other way round
    (Smith 2018, arXiv:1803.09820).

    cycle_first_stair_count: the way up in so many stairs; 0: continuous. decay_step_size: after the cycle,
    every so many steps another decay_lr_rate and decay_mom_rate; 0: no decay.
    """
    up, first = cycle_first_stair_count, cycle_first_step_size
    down = up if cycle_second_stair_count is None else cycle_second_stair_count
    second = first if cycle_second_step_size is None else cycle_second_step_size

    def height(n: int) -> float:
        """Where between the rates the cycle is, from 0 to 1."""
        exact, stairs = (n / first, up) if n <= first else (1 - (n - first) / second, down)
        return math.floor(exact * stairs) / stairs if stairs else exact

    def decays(n: int) -> float:
        return (n - first - second) / decay_step_size if decay_step_size else 0.0

    def rate(n: int) -> tuple[float, float]:
        if n > first + second:
            return 1 / (1 + decay_lr_rate * decays(n)), 0.0
        return 1 - height(n), height(n)

    def momentum(n: int) -> tuple[float, float]:
        if n > first + second:
            return 0.0, 1 + decay_mom_rate * decays(n)
        return (height(n), 1 - height(n)) if n else (1.0, 0.0)

    low = _each(optimizer, "cycle_min_lr", cycle_min_lr)
    high = _each(optimizer, "cycle_max_lr", cycle_max_lr)
    low_momentum = _each(optimizer, "cycle_min_mom", cycle_min_mom)
    high_momentum = _each(optimizer, "cycle_max_mom", cycle_max_mom)
    betas = (low_momentum, high_momentum, momentum) if cycle_momentum else None
    return _Schedule(optimizer, (low, high, rate), betas)


def _each(optimizer: Optimizer, name: str, given: Rates | None) -> list[float]:
    """One value for each of the param_groups; None: their rates, as they were before other schedulers."""
    groups = optimizer.param_groups
    values = [group.get("initial_lr", group["lr"]) for group in groups] if given is None else given
    values = [values] * len(groups) if isinstance(values, int | float) else values
    if len(values) != len(groups):
        raise ConfigError(f"{name} has {len(values)} values, but the optimizer {len(groups)} param_groups")
    return [float(value) for value in values]


def _warm_up(steps: int, kind: str) -> Callable[[int], float]:
    """The part of the way up, from 0 to 1, after so many steps before the last one."""
    if steps < 1:
        raise ConfigError(f"warmup_num_steps is {steps}: expected at least 1")
    if kind == "linear":
        return lambda before: min(1.0, before / steps)
    if kind == "log":
        return lambda before: min(1.0, math.log(before + 1) / math.log(max(2, steps)))
    raise ConfigError(f"warmup_type is {kind!r}: expected 'log' or 'linear'")
