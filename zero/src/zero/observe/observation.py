"""What the parts of an engine report to, and what tells its observers.

While there are none, a report costs a look at an empty list. Otherwise the device's time is taken by events,
and its numbers travel to the host beside the computation; a step is told once both have arrived.
"""

from __future__ import annotations

import atexit
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from accelz import Accelerator
from accelz import Event as DeviceEvent
from zero.errors import UsageError
from zero.observe.observer import ALONE, KINDS, Event, Observer, Run, Step
from zero.observe.transfers import Transfer, Transfers, rates
from zero.warning import warn

PATIENCE = 10.0
"""Seconds that the device is waited for when an observation ends."""
_OF_STEPS = ("forward", "backward")
_TAKEN = {field.name for field in fields(Step)} | {*ALONE, "step"}
_KINDS = tuple(f"{kind}/" for kind in KINDS if kind != "memory")  # each rank's memory/ may be told
_TIME_EVERY = 1.0  # seconds between steps whose transfers are timed
_LATE = 32  # steps that may be untold, before those that the device has not passed are waited for


@dataclass(frozen=True)
class Facts:
    """Of a step that is over: those that the host has, and numbers that the device has. totals: of what only
    grows, by field of `Step`; an observer is told the difference."""

    known: Mapping[str, Any]
    totals: dict[str, Mapping[str, float]]
    on_device: dict[str, Tensor]


@dataclass
class _Ended:
    """A step that the host is past."""

    number: int
    time: float
    marks: list[tuple[str, DeviceEvent]]  # phases, each from its event to the next one's
    facts: Facts
    logged: dict[str, list[float | Tensor]] = field(default_factory=dict)
    host: Tensor | None = None
    names: tuple[str, ...] = ()
    transfers: list[Transfer] = field(default_factory=list)
    arrived: DeviceEvent | None = None


class Observation:
    """observers: those that are told, on this rank. transfers: what collectives and copies report to."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.observers: list[Observer] = []
        self.transfers = Transfers(accelerator)
        self._timed = -_TIME_EVERY  # when transfers were, last
        self._accelerator = accelerator
        self._facts: Callable[[], Facts]
        self._rates = (0.0, 0.0)
        self._steps = 0
        self._begun = False  # the step, with its first forward
        self._marks: list[tuple[str, DeviceEvent]] = []
        self._logged: dict[str, list[float | Tensor]] = {}
        self._over: _Ended | None = None  # until the next begins: the program may log what belongs to it
        self._untold: deque[_Ended] = deque()
        self._events: deque[Event] = deque()  # appended to by any thread
        self._totals: dict[str, Mapping[str, float]] = {}

    # -- for the engine ---------------------------------------------------------------------------------

    def begin(
        self, observers: list[Observer], run: Run, facts: Callable[[], Facts], flops: float, peak_flops: float
    ) -> None:
        """Tell these observers, too. facts: of the step that is just over; see `Facts`."""
        if not self.observers:
            self._facts, self._steps = facts, run.steps
            self._totals = facts().totals
            self._marks = [("outside", self._now())]
            self._begun, self._over = False, None
            self._logged.clear()
            self._untold.clear()  # of observers that have ended by themselves
            self._events.clear()
            atexit.register(self.close)
        self._rates = flops or self._rates[0], peak_flops or self._rates[1]
        self.observers += [each for each in observers if _told(each, lambda observer: observer.begin(run))]

    def close(self, observers: Sequence[Observer] | None = None) -> None:
        """Tell what is left, as far as the device comes to it, and these observers (None: all) no more from
        now on."""
        self._settle()
        kept: list[Observer] = []
        deadline = time.monotonic() + PATIENCE
        while self._untold and (self._deliver() or time.monotonic() < deadline):
            time.sleep(0.001 * bool(self._untold))
        self._deliver()
        for each in self.observers:
            if observers is None or any(each is other for other in observers):
                _told(each, lambda observer: observer.close())
            else:
                kept.append(each)
        self.observers = kept
        if not kept:
            self.transfers.on = False
            atexit.unregister(self.close)
            self._untold.clear()

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Note numbers of the step under way, or of the one before if the next has not begun.

        Raises UsageError, on ranks without observers, too, for names that observers are told by themselves,
        and for values that are neither numbers nor tensors of one element.
        """
        if taken := sorted(name for name in values if name in _TAKEN or name.startswith(_KINDS)):
            raise UsageError(f"log({taken[0]}=...): observers are told the engine's own; choose another name")
        for name, value in values.items():
            if not (value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)):
                told = f"a tensor of {value.numel()}" if isinstance(value, Tensor) else type(value).__name__
                raise UsageError(f"log({name}=...) takes a number or a tensor of one element, not {told}")
        if self.observers:
            into = self._logged if self._over is None else self._over.logged
            for name, value in values.items():
                kept = value.detach().clone() if isinstance(value, Tensor) else float(value)
                into.setdefault(name, []).append(kept)

    def load(self, steps: int) -> None:
        """A checkpoint has been loaded, and the engine has taken this many steps now."""
        self._steps = steps

    # -- for its parts ------------------------------------------------------------------------------------

    def phase(self, name: str) -> None:
        """A phase begins, and the one before it is over; see `Step.phases`."""
        if self.observers:
            if not self._begun and name in _OF_STEPS:
                self._begin_step()
            if self._marks[-1][0] != name:
                self._marks.append((name, self._now()))

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Make the block a phase of its own."""
        if not self.observers:
            yield
            return
        before = self._marks[-1][0]
        self.phase(name)
        try:
            yield
        finally:
            self.phase(before)

    def step_over(self, number: int) -> None:
        """An optimizer has stepped; where there are several, another may follow in the same step."""
        if self.observers:
            self._steps = number
            marks, logged = [*self._marks, ("", self._now())], self._logged
            if self._over is not None:  # the same step's, of another optimizer
                marks, logged = self._over.marks[:-1] + marks, self._over.logged
            self._over = _Ended(number, time.time(), marks, self._facts(), logged)
            self._over.transfers, self.transfers.noted = self.transfers.noted, []
            self.transfers.on = False
            self._logged, self._begun = {}, False
            self._marks = [("outside", marks[-1][1])]

    def event(
        self,
        kind: str,
        text: str,
        seconds: Mapping[str, float] | None = None,
        nbytes: int = 0,
        details: Mapping[str, object] | None = None,
    ) -> None:
        """Something happens beside the steps; in any thread. It is told when the training thread comes
        here."""
        if self.observers:
            self._events.append(
                Event(kind, self._steps, time.time(), text, seconds or {}, nbytes, details or {})
            )

    # -- inside -------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._begun = True
        self._settle()
        self._deliver()
        self.transfers.on = time.monotonic() - self._timed > _TIME_EVERY
        if self.transfers.on:
            self._timed = time.monotonic()
        self._tell(lambda observer: observer.begin_step(self._steps + 1))

    def _settle(self) -> None:
        """The program has logged what it logs of the last step: have the device's numbers travel."""
        over, self._over = self._over, None
        if over is None:
            return
        found = dict(over.facts.on_device)
        for name, values in over.logged.items():
            if any(isinstance(each, Tensor) for each in values):
                found[name] = _mean(name, values)
        if found:
            numbers = torch.stack([_number(each, self._accelerator.device) for each in found.values()])
            over.host = self._accelerator.memory.empty_host(numbers.shape, torch.float32)
            over.host.copy_(numbers, non_blocking=True)
        over.names = tuple(found)
        over.arrived = self._now()
        self._untold.append(over)

    def _deliver(self) -> bool:
        """Tell of all that has arrived; whether anything had."""
        told = False
        while self._untold:
            arrived = self._untold[0].arrived
            assert arrived is not None
            if len(self._untold) <= _LATE and not arrived.done():
                break
            arrived.synchronize()
            step, told = self._step_of(self._untold.popleft()), True
            self._tell(lambda observer, step=step: observer.step(step))  # type: ignore[misc]
        while self._events:
            event = self._events.popleft()
            self._tell(lambda observer, event=event: observer.event(event))  # type: ignore[misc]
        return told

    def _step_of(self, over: _Ended) -> Step:
        arrived = dict(zip(over.names, [] if over.host is None else over.host.numpy().tolist(), strict=True))
        phases: dict[str, float] = {}
        for (name, begin), (_, end) in itertools.pairwise(over.marks):
            phases[name] = phases.get(name, 0.0) + end.seconds_since(begin)
        before, self._totals = self._totals, over.facts.totals
        found = rates(over.transfers) if over.transfers else {}
        growth: dict[str, Any] = {kind: _growth(n, before[kind]) for kind, n in over.facts.totals.items()}
        known = {name: arrived.pop(name) for name in over.facts.on_device}
        known["skipped"] = known.get("skipped", 0) > 0
        busy = growth.pop("busy")
        found |= {tier: 1e9 * growth["moved"].get(tier, 0) / ns for tier, ns in busy.items() if ns}
        flops, peak = self._rates
        logged = {n: arrived[n] if n in arrived else _mean(n, values) for n, values in over.logged.items()}
        return Step(
            number=over.number,
            time=over.time,
            phases=phases,
            logged=logged,
            waited=growth.pop("waited")["waited"],
            rates={kind: rate for kind, rate in found.items() if rate},
            flops=flops,
            peak_flops=peak,
            **growth,
            **over.facts.known,
            **known,
        )

    def _tell(self, call: Callable[[Observer], None]) -> None:
        self.observers = [each for each in self.observers if _told(each, call) and not each.over]

    def _now(self) -> DeviceEvent:
        return self._accelerator.streams.current().record()


def _told(observer: Observer, call: Callable[[Observer], None]) -> bool:
    """Call an observer; whether it can be told of more."""
    try:
        call(observer)
    except Exception as error:
        warn(
            f"{type(observer).__name__} is told of nothing more, as it has raised {type(error).__name__}: "
            f"{error}",
            RuntimeWarning,
        )
        return False
    return True


def _mean(name: str, values: list[Any]) -> Any:
    """Of numbers, or of numbers and 0-dim tensors; of "tokens", the sum."""
    total = sum(values[1:], values[0])
    return total if name == "tokens" or len(values) == 1 else total / len(values)


def _number(value: Tensor, device: torch.device) -> Tensor:
    """The 0-dim fp32 tensor on the device for a tensor of one element."""
    is_one = value.ndim == 0 and value.dtype is torch.float32 and not value.requires_grad
    if is_one and value.device == device:
        return value  # as are most: nothing is called
    return value.detach().reshape(()).to(device, torch.float32)


def _growth(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, Any]:
    """What has been added since; all of it, where the program has cleared what there was."""
    return {name: n - earlier if n >= (earlier := before.get(name, 0)) else n for name, n in now.items()}


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Note the time that the block takes, for an event."""
    began = time.monotonic()
    yield
    seconds[phase] = time.monotonic() - began


class Observing(AbstractContextManager["Observing"]):
    """What `engine.observe` returns: `close()`, or the end of a `with` block, ends the observation by
    these observers."""

    def __init__(self, observation: Observation, observers: Sequence[Observer]) -> None:
        self._observation, self._observers = observation, observers

    def close(self) -> None:
        self._observation.close(self._observers)

    def __exit__(self, *_: object) -> None:
        self.close()
