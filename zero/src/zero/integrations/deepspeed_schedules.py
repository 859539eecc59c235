"""DeepSpeed's learning rate schedules, by DeepSpeed's names and parameters, as schedulers of torch.

`n` is how often the scheduler has stepped: 0 in the first optimizer step. The rates are those of DeepSpeed
0.19 in every step, its peculiarities included: schedules with a warm-up stay at their first rate for two
steps, WarmupCosineLR is at 0 in the first, and OneCycle begins at cycle_min_mom and sets beta2 to 0.99.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero.errors import ConfigError

Rates = float | Sequence[float]
"""One value for all param_groups, or one for each."""
_STATE = ("last_epoch", "_step_count", "_last_lr")


class _Schedule(LRScheduler):
    """Sets rates that depend on the number of steps only, so that a checkpoint needs no other state."""

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """The rates of the param_groups after `last_epoch` steps."""
        return [self.rate(group, self.last_epoch) for group in range(len(self.base_lrs))]

    def rate(self, group: int, n: int) -> float:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """How many steps there have been. What is configured is not part of it."""
        return {name: self.__dict__[name] for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`, with what is configured now."""
        super().load_state_dict({name: state_dict[name] for name in _STATE})

    def _each(self, optimizer: Optimizer, name: str, given: Rates) -> list[float]:
        """One value for each of the param_groups."""
        groups = len(optimizer.param_groups)
        values = [given] * groups if isinstance(given, int | float) else list(given)
        if len(values) != groups:
            raise ConfigError(f"{name} has {len(values)} values, but the optimizer {groups} param_groups")
        return [float(value) for value in values]


class _WarmUp(_Schedule):
    """Schedules that begin with a warm-up over `warmup_num_steps` steps."""

    def __init__(self, optimizer: Optimizer, warmup_num_steps: int, warmup_type: str) -> None:
        if warmup_num_steps < 1:
            raise ConfigError(f"warmup_num_steps is {warmup_num_steps}: expected at least 1")
        if warmup_type not in ("log", "linear"):
            raise ConfigError(f"warmup_type is {warmup_type!r}: expected 'log' or 'linear'")
        self.warmup_num_steps, self.warmup_type = warmup_num_steps, warmup_type
        super().__init__(optimizer)

    def height(self, before: int) -> float:
        """The part of the way up, from 0 to 1, after `before` steps before the last one."""
        if before >= self.warmup_num_steps:
            return 1.0
        if self.warmup_type == "linear":
            return before / self.warmup_num_steps
        return math.log(before + 1) / math.log(max(2, self.warmup_num_steps))


class WarmupLR(_WarmUp):
    """From warmup_min_lr to warmup_max_lr in `warmup_num_steps` steps, then constant.

    warmup_max_lr: None is the optimizer's own rate. warmup_type: "log" or "linear".
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        own = [
            group.get("initial_lr", group["lr"]) for group in optimizer.param_groups
        ]  # before any scheduler
        top = own if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = self._each(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._each(optimizer, "warmup_max_lr", top)
        super().__init__(optimizer, warmup_num_steps, warmup_type)

    def rate(self, group: int, n: int) -> float:
        low, high = self.min_lrs[group], self.max_lrs[group]
        return low + (high - low) * self.height(max(n - 1, 0))


class WarmupDecayLR(WarmupLR):
    """As WarmupLR, then linearly down to warmup_min_lr at step `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def height(self, before: int) -> float:
        if before < self.warmup_num_steps:
            return super().height(before)
        left = (self.total_num_steps - before) / max(1, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, left)


class WarmupCosineLR(_WarmUp):
    """A share of the optimizer's own rate: from warmup_min_ratio to 1, then along a half cosine to
    cos_min_ratio at step `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, warmup_num_steps, warmup_type)

    def rate(self, group: int, n: int) -> float:
        return 0.0 if n == 0 else self.base_lrs[group] * self.ratio(n - 1)  # type: ignore[return-value]

    def ratio(self, before: int) -> float:
        if before < self.warmup_num_steps:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self.height(before)
        done = (before - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps)
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return self.cos_min_ratio + (1 - self.cos_min_ratio) * cosine


class LRRangeTest(_Schedule):
    """A rate that grows without end, to find the largest one that trains (Smith 2018, arXiv:1803.09820)."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 0.001,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        self.min_lrs = self._each(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer)

    def rate(self, group: int, n: int) -> float:
        intervals = n // self.step_size if self.staircase else n / self.step_size
        return self.min_lrs[group] * (1 + self.step_rate * intervals)


class OneCycle(_Schedule):
    """Up to cycle_max_lr and down again, then a decay, with the momentum (Adam's beta1) the other way round
    (Smith 2018, arXiv:1803.09820).

    cycle_first_stair_count: the way up in so many stairs; 0: continuous. decay_step_size: after the cycle,
    every so many steps another decay_lr_rate and decay_mom_rate; 0: no decay.
    """

    def __init__(
        self,
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
    ) -> None:
        first, stairs = cycle_first_step_size, cycle_first_stair_count
        self.sizes = first, first if cycle_second_step_size is None else cycle_second_step_size
        self.stairs = stairs, stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_lrs = self._each(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._each(optimizer, "cycle_max_lr", cycle_max_lr)
        self.min_moms = self._each(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = self._each(optimizer, "cycle_max_mom", cycle_max_mom)
        self.cycle_momentum = cycle_momentum
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """The rates; momentum goes with them."""
        for index, group in enumerate(self.optimizer.param_groups):
            if self.cycle_momentum and "betas" in group:
                group["betas"] = (self.momentum(index, self.last_epoch), 0.99)
        return super().get_lr()

    def rate(self, group: int, n: int) -> float:
        low, high = self.min_lrs[group], self.max_lrs[group]
        if n > sum(self.sizes):
            return low / (1 + self.decay_lr_rate * self._decays(n))
        return low + (high - low) * self._height(n)

    def momentum(self, group: int, n: int) -> float:
        low, high = self.min_moms[group], self.max_moms[group]
        if n == 0:
            return low
        if n > sum(self.sizes):
            return high * (1 + self.decay_mom_rate * self._decays(n))
        return high - (high - low) * self._height(n)

    def _decays(self, n: int) -> float:
        return (n - sum(self.sizes)) / self.decay_step_size if self.decay_step_size else 0.0

    def _height(self, n: int) -> float:
        """Where between the rates the cycle is, from 0 to 1."""
        (first, second), (up, down) = self.sizes, self.stairs
        if n <= first:
            return _stair(n / first, up)
        return _stair(1 - (n - first) / second, down)


def _stair(height: float, count: int) -> float:
    return math.floor(height * count) / count if count else height
