"""The kernels' part of a step as a graph: captured once its operands stay where they are, then replayed.

A replay does what calling the kernels does, with the same bits, and costs the host one launch. It works on
the addresses that were captured, so it takes the kernels' place only in steps whose operands and settings are
those of the capture; in all others the kernels are called. Learning rates may change: a graph finds them on
the device (`accelz.updates.Update.rates`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelz import Accelerator, Graph
from zero.optimizer.group_step import Factors
from zero.optimizer.kernel_rules import Rule
from zero.optimizer.stepped import StepGradients, SteppedSubGroup, Turn
from zero.ranges import in_range
from zero.warning import warn

STEADY = 2
"""Steps in a row with the operands of the one before, after which the next is captured: that costs as much as
some steps do."""
PATIENCE = 100
"""Steps without a single replay after which there is a warning."""

Operands = tuple[Any, ...]
Call = Callable[[Tensor | None], None]


class CapturedStep:
    """Steps by replays where it can. replays: how many so far. optimizer: whose param_groups are stepped."""

    def __init__(self, accelerator: Accelerator, optimizer: Optimizer) -> None:
        self.replays = 0
        self._accelerator = accelerator
        self._optimizer = optimizer
        self._graph: Graph | None = None
        self._captured: Operands | None = None
        self._last: Operands | None = None
        self._steady = 0
        self._calls = 0
        self._refused = False
        self._rules: dict[int, Rule] = {}  # of the param_groups that are stepped
        self._rates: Tensor | None = None
        self._written: list[float] = []

    def step(self, turns: Sequence[Turn], factors: Factors, call: Call) -> None:
        """Make the step of these sub-groups. call: makes it by calling kernels, with `rates` where given,
        (param_groups, 2)."""
        found = None if self._refused else self._operands(turns, factors)
        if found is not None and found == self._captured:
            self._replay(turns)
            return
        self._steady = self._steady + 1 if found is not None and found == self._last else 0
        self._last = found
        if self._steady < STEADY or not self._capture(call):
            self._call_kernels(call)
            return
        self._captured = found

    def drop(self) -> None:
        """Drop the graph, with its memory: what it works on is about to go. A later step is captured anew."""
        self._graph = self._captured = self._last = self._rates = None
        self._written = []

    def _call_kernels(self, call: Call) -> None:
        call(None)
        self._calls += 1
        if self._calls == PATIENCE and not self.replays and not self._refused:
            warn(_NEVER.format(PATIENCE, _STAYS_OUT if self._last is None else _MOVES), RuntimeWarning)

    @in_range("update")
    def _replay(self, turns: Sequence[Turn]) -> None:
        assert self._graph is not None
        self._write_rates()
        self._graph.replay()
        for stepped, _ in turns:
            if stepped.rule is not None and stepped.rule.counts:
                stepped.remember(())
        self.replays += 1

    def _capture(self, call: Call) -> bool:
        """Capture a step and make it; returns whether that was possible."""
        self._graph = self._captured = None  # its memory, before there is another's
        self._written = []  # with other settings, weights may decay otherwise at the same lr
        try:
            self._write_rates()
            rates = self._rates
            self._graph = self._accelerator.streams.capture(lambda: call(rates))
        except Exception as error:
            self._refused = True
            warn(_REFUSED.format(f"{type(error).__name__}: {error}"), RuntimeWarning)
            return False
        self._graph.replay()
        return True

    def _write_rates(self) -> None:
        """Write lr, and the factor by which weights decay, of each param_group, if an lr has changed."""
        groups = self._optimizer.param_groups
        found = [float(group["lr"]) for group in groups]
        if found == self._written:
            return
        rules = self._rules
        rows = [_rates(rules[i], group) if i in rules else (0.0, 0.0) for i, group in enumerate(groups)]
        if self._rates is None:
            self._rates = torch.empty(len(rows), 2, dtype=torch.float32, device=self._accelerator.device)
        self._rates.copy_(torch.tensor(rows, dtype=torch.float32), non_blocking=True)
        self._written = found

    def _operands(self, turns: Sequence[Turn], factors: Factors) -> Operands | None:
        """All that a step of kernels depends on but for values on the device and learning rates; None if it
        cannot be captured."""
        device, groups = self._accelerator.device, self._optimizer.param_groups
        found: list[Any] = [_address(factors.scale), _address(factors.skip)]
        rules: dict[int, Rule] = {}
        for stepped, have in turns:
            tensors = _tensors(stepped, have, device)
            if tensors is None or stepped.rule is None:
                return None
            runs = stepped.runs(())
            rules |= {stepped.pieces[first].param_group: stepped.rule for first, _ in runs}
            found += (stepped, runs, *((each.data_ptr(), each.dtype) for each in tensors))
        self._rules = rules
        return (*found, *((index, *_settings(rule, groups[index])) for index, rule in rules.items()))


def _tensors(stepped: SteppedSubGroup, have: StepGradients, device: torch.device) -> list[Tensor] | None:
    """What the kernels of a sub-group read and write; None if they cannot be captured."""
    sub, record = stepped.sub, stepped.record
    if not record.tier.near or sub.streamed or stepped.missing(have.used):
        return None
    values = (*record.columns, sub.shard, have.slice.find(), stepped.steps)
    tensors = [each for each in values if isinstance(each, Tensor) and each.device == device]
    return tensors if len(tensors) == len(values) and tensors[0].dtype is not torch.float64 else None


def _settings(rule: Rule, group: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(value for name, value in rule.options(group).items() if name != "lr")


def _rates(rule: Rule, group: dict[str, Any]) -> tuple[float, float]:
    nothing = torch.empty(0)
    moments: dict[str, Any] = dict.fromkeys(rule.moments, nothing)
    update = rule.update(master=nothing, grad=nothing, step=nothing, **moments, **rule.options(group))
    return update.lr, update.decay


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


_REFUSED = (
    "capture_step: the optimizer's part of a step could not be captured; its kernels are called one by one "
    "from now on: {}"
)
_NEVER = (
    "capture_step has had no effect in {} steps: {}. Leave it out, or see docs/optimizers.md for what is "
    "captured"
)
_MOVES = "gradients are at other addresses in each step, or settings other than lr change"
_STAYS_OUT = "some parameters have no gradients, no kernel steps them, or their state is not on the device"
