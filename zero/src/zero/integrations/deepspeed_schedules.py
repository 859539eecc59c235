"""DeepSpeed's learning rate schedules, by DeepSpeed's names and parameters, as schedulers of torch.

`n` is how often the scheduler has stepped: 0 in the first optimizer step. The rates are those of DeepSpeed
0.19 in every step, its peculiarities included: schedules with a warm-up stay at their first rate for two
steps, WarmupCosineLR is at 0 in the first, and OneCycle begins at cycle_min_mom and sets beta2 to 0.99. As in
DeepSpeed, a checkpoint has the number of steps, and no parameters.
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
Course = Callable[[int, int], float]
"""A value by the number of the param_group, and of steps."""


class Schedule(LRScheduler):
    """Sets rates, and Adam's beta1 where `momentum` is given, that depend on the number of steps only."""

    def __init__(self, optimizer: Optimizer, rate: Course, momentum: Course | None = None) -> None:
        self._courses = rate, momentum
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """The rates of the param_groups after `last_epoch` steps; momentum goes with them."""
        rate, momentum = self._courses
        for index, group in enumerate(self.optimizer.param_groups):
            if momentum is not None and "betas" in group:
                group["betas"] = (momentum(index, self.last_epoch), 0.99)
        return [rate(index, self.last_epoch) for index in range(len(self.base_lrs))]

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "_courses"}


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
    height = _warm_up(warmup_num_steps, warmup_type)
    return _between(optimizer, warmup_min_lr, warmup_max_lr, height)


def WarmupDecayLR(
    optimizer: Optimizer,
    total_num_steps: int,
    warmup_min_lr: Rates = 0.0,
    warmup_max_lr: Rates | None = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> LRScheduler:
    """As WarmupLR, then linearly down to warmup_min_lr at step `total_num_steps`."""
    warm_up = _warm_up(warmup_num_steps, warmup_type)

    def height(before: int) -> float:
        if before < warmup_num_steps:
            return warm_up(before)
        return max(0.0, (total_num_steps - before) / max(1, total_num_steps - warmup_num_steps))

    return _between(optimizer, warmup_min_lr, warmup_max_lr, height)


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
    warm_up = _warm_up(warmup_num_steps, warmup_type)
    own = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]

    def ratio(before: int) -> float:
        if before < warmup_num_steps:
            return warmup_min_ratio + (1 - warmup_min_ratio) * warm_up(before)
        done = (before - warmup_num_steps + 1) / max(1, total_num_steps - warmup_num_steps)
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return cos_min_ratio + (1 - cos_min_ratio) * cosine

    return Schedule(optimizer, lambda group, n: own[group] * ratio(n - 1) if n else 0.0)


def LRRangeTest(
    optimizer: Optimizer,
    lr_range_test_min_lr: Rates = 0.001,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> LRScheduler:
    """A rate that grows without end, to find the largest one that trains (Smith 2018, arXiv:1803.09820)."""
    lowest = _each(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)

    def rate(group: int, n: int) -> float:
        intervals = n / lr_range_test_step_size
        taken = math.floor(intervals) if lr_range_test_staircase else intervals
        return lowest[group] * (1 + lr_range_test_step_rate * taken)

    return Schedule(optimizer, rate)


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
    first, up = cycle_first_step_size, cycle_first_stair_count
    second = first if cycle_second_step_size is None else cycle_second_step_size
    down = up if cycle_second_stair_count is None else cycle_second_stair_count
    low, high = _each(optimizer, "cycle_min_lr", cycle_min_lr), _each(optimizer, "cycle_max_lr", cycle_max_lr)
    least, most = (
        _each(optimizer, "cycle_min_mom", cycle_min_mom),
        _each(optimizer, "cycle_max_mom", cycle_max_mom),
    )

    def decays(n: int) -> float:
        return (n - first - second) / decay_step_size if decay_step_size else 0.0

    def height(n: int) -> float:
        """Where between the rates the cycle is, from 0 to 1."""
        return _stair(n / first, up) if n <= first else _stair(1 - (n - first) / second, down)

    def rate(group: int, n: int) -> float:
        if n > first + second:
            return low[group] / (1 + decay_lr_rate * decays(n))
        return low[group] + (high[group] - low[group]) * height(n)

    def momentum(group: int, n: int) -> float:
        if n == 0:
            return least[group]
        if n > first + second:
            return most[group] * (1 + decay_mom_rate * decays(n))
        return most[group] - (most[group] - least[group]) * height(n)

    return Schedule(optimizer, rate, momentum if cycle_momentum else None)


def _warm_up(steps: int, kind: str) -> Callable[[int], float]:
    """The part of the way up, from 0 to 1, by the number of steps before the last one."""
    if steps < 1:
        raise ConfigError(f"warmup_num_steps is {steps}: expected at least 1")
    if kind not in ("log", "linear"):
        raise ConfigError(f"warmup_type is {kind!r}: expected 'log' or 'linear'")

    def height(before: int) -> float:
        if before >= steps:
            return 1.0
        return before / steps if kind == "linear" else math.log(before + 1) / math.log(max(2, steps))

    return height


def _between(
    optimizer: Optimizer, low: Rates, high: Rates | None, height: Callable[[int], float]
) -> LRScheduler:
    """Rates from `low` to `high` (None: the optimizer's own). height: where between them, from 0 to 1."""
    lowest = _each(optimizer, "warmup_min_lr", low)
    own = [group["lr"] for group in optimizer.param_groups]
    highest = _each(optimizer, "warmup_max_lr", own if high is None else high)
    return Schedule(
        optimizer, lambda group, n: lowest[group] + (highest[group] - lowest[group]) * height(max(n - 1, 0))
    )


def _each(optimizer: Optimizer, name: str, given: Rates) -> list[float]:
    """One value for each of the param_groups."""
    groups = len(optimizer.param_groups)
    values = [given] * groups if isinstance(given, int | float) else list(given)
    if len(values) != groups:
        raise ConfigError(f"{name} has {len(values)} values, but the optimizer {groups} param_groups")
    return [float(value) for value in values]


def _stair(height: float, count: int) -> float:
    return math.floor(height * count) / count if count else height
