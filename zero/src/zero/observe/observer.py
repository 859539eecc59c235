"""What an observer is told, and how: subclass `Observer`, and override what is of interest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

Numbers = Mapping[str, float]
ALONE = "learning_rate", "grad_norm", "loss_scale", "seconds", "tokens_per_second", "mfu", "skipped", "waited"
"""Attributes of a step that are one number each, or None."""
KINDS = ("seconds", "calls", "bytes", "rates", "moved", "memory")
"""Of numbers that a step has by name, such as "seconds/forward"."""


@dataclass(frozen=True)
class Run:
    """What is observed. model: its class. parameters: of the whole model. steps: taken so far, as by a run
    that is resumed. settings: of `zero.Config`, as JSON values."""

    model: str
    device: str
    rank: int
    world_size: int
    parameters: int
    steps: int
    settings: Mapping[str, object]


@dataclass(frozen=True)
class Step:
    """An optimizer step that is over.

    number: from 1, with skipped steps. time: when it was over, in seconds since 1970. phases: seconds of the
    device in "forward", "backward", "step" (the optimizer's), "outside" (everything else since the step
    before, such as loading data), "evaluation" (from a forward without gradients to the next with them) and
    "checkpoint". logged: what the program gave to `engine.log`. calls, bytes: of collectives, by kind.
    units: bytes of collectives, by unit. rates: bytes per second, by kind of collective and between tiers, in
    a step about once a second; of what was waited for, from when it was issued. waited: seconds of the host
    in collectives, which a device that works by itself need not have waited. moved: bytes between tiers, such
    as "to host". memory: bytes of the device, at most a second or so ago, by category, with "allocated",
    "peak" and "capacity". learning_rate: of the first param group. grad_norm: None where nobody measures it.
    loss_scale: None if there is none. skipped: because gradients overflowed. flops: of the model for one
    token, peak_flops: of the device for one second, as given to `engine.observe`; 0 if they are not known.
    ranks: of the job.
    """

    number: int
    time: float
    phases: Numbers
    logged: Numbers
    learning_rate: float
    calls: Mapping[str, int]
    bytes: Mapping[str, int]
    waited: float
    moved: Mapping[str, int]
    memory: Mapping[str, int]
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False
    flops: float = 0.0
    peak_flops: float = 0.0
    ranks: int = 1
    units: Mapping[str, int] = field(default_factory=dict)
    rates: Numbers = field(default_factory=dict)

    @cached_property
    def seconds(self) -> float:
        """From the end of the step before to the end of this one, without evaluations and checkpoints."""
        return sum(s for phase, s in self.phases.items() if phase not in ("evaluation", "checkpoint"))

    @property
    def tokens_per_second(self) -> float | None:
        """Of the job, whose ranks have as many tokens each; None if no "tokens" were logged."""
        if "tokens" not in self.logged or not self.seconds:
            return None
        return self.logged["tokens"] * self.ranks / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization (Chowdhery et al., PaLM, 2022): the share of the device's peak that the
        model's own operations take; None if its parts are not known."""
        speed = self.tokens_per_second
        if speed is None or not (self.flops and self.peak_flops):
            return None
        return speed / self.ranks * self.flops / self.peak_flops

    def metrics(self) -> dict[str, float]:
        """All but `units` as one number each, for writers that take names and numbers."""
        single = {name: float(n) for name in ALONE if (n := getattr(self, name)) is not None}
        every = self.phases, self.calls, self.bytes, self.rates, self.moved, self.memory
        of_kinds = zip(KINDS, every, strict=True)
        named = {f"{kind}/{name}": n for kind, numbers in of_kinds for name, n in numbers.items()}
        return {**self.logged, **single, **named}


def chosen(step: Step, every: int) -> dict[str, float]:
    """What a writer is to tell that takes a call for each number: what the program has logged, and of each
    `every`-th step all metrics."""
    return dict(step.logged) if step.number % every else step.metrics()


@dataclass(frozen=True)
class Event:
    """What happens beside the steps. kind: "save", "load", "out of memory", "placement" or "memory" (of a
    step that `engine.trace_memory` has asked for). step: the last that was complete. time: in seconds since
    1970. text: for people. seconds: by phase. bytes: written, read or moved by this rank. details: JSON
    values; of "memory", its timeline.
    """

    kind: str
    step: int
    time: float
    text: str
    seconds: Numbers = field(default_factory=dict)
    bytes: int = 0
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def rates(self) -> Numbers:
        """Bytes per second, by phase in which this rank's bytes move."""
        moving = {
            phase: s for phase, s in self.seconds.items() if phase in ("collect", "write", "load") and s
        }
        return {phase: self.bytes / seconds for phase, seconds in moving.items()} if self.bytes else {}


class Observer:
    """Told of a training run by `engine.observe`. Methods here do nothing.

    Calls come from the thread that trains, in order, and never while the device is waited for: a step is told
    once the device has passed it, maybe during a later one. An exception ends the observer, with a
    warning, and training goes on.

    every_rank: whether each rank's is told of that rank, rather than rank 0's alone. over: whether it wants
    to be told of nothing more.
    """

    every_rank = False
    over = False

    def begin(self, run: Run) -> None:
        """The observer is told from now on."""

    def begin_step(self, number: int) -> None:
        """A step's first forward begins."""

    def step(self, step: Step) -> None:
        """A step is over."""

    def event(self, event: Event) -> None:
        """Something has happened beside the steps."""

    def close(self) -> None:
        """Nothing more comes: the observation, or the program, ends."""
