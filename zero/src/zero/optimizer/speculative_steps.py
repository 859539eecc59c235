"""Optimizer steps of records on the host, made while backward goes on, and exact nevertheless.

When a group's reduced gradient lands in host memory, a thread steps the shadows of its records, with the
factor of gradients that are neither clipped nor overflow, and the hyper-parameters of that moment. Nobody
sees the shadows: weights, masters and moments stay the old ones until the optimizer step. The step puts a
shadow in its record's place if the step that is due is the one that the shadow has made, from the values that
the record still has. Otherwise, or if the attempt failed, nothing has happened, and the record is stepped
then. Nothing is ever stale, as it is with the delayed update of ZeRO-Offload (Ren et al., 2021).

A shadow that is not committed is wasted work. So after a step whose gradients were clipped or overflowed, no
shadow is stepped until a step's gradients are neither.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from accelz import Stream, Streams
from zero.gradients.group_gradients import GroupGradients
from zero.optimizer.group_step import Factors, GroupStep
from zero.optimizer.owned import OwnedSubGroup, Turn
from zero.optimizer.shadow_record import ShadowRecord
from zero.sharding.flat_group import FlatGroup
from zero.sharding.sub_group import SubGroup
from zero.tiers.carrier import HostCopy
from zero.tiers.stores import Stores

PlanStep = Callable[[OwnedSubGroup, set[int]], GroupStep]


@dataclass
class _Attempt:
    """versions: of the originals when the attempt began; an in-place change of an original changes its
    version."""

    step: GroupStep
    versions: list[int]
    done: Future[None]


class SpeculativeSteps:
    """An observer of the gradients that steps shadow records as they arrive.

    expected(): factor and skip, on the device, of gradients that are neither clipped nor overflow. committed,
    wasted: of the steps of sub-groups begun so far, how many were of use, and how many were not.
    """

    def __init__(
        self,
        stores: Stores,
        owned: Mapping[FlatGroup, Sequence[OwnedSubGroup]],
        plan: PlanStep,
        expected: Callable[[], tuple[Tensor | None, Tensor | None]],
    ) -> None:
        self.committed = 0
        self.wasted = 0
        self._stores = stores
        self._owned = owned
        self._plan = plan
        self._expected = expected
        self._shadows = {
            mine.sub: ShadowRecord(stores, mine)
            for group, subs in owned.items()
            for mine in subs
            if mine.sub.kept.tier == "host" and group.placement.gradients == "host"
        }
        self._attempts: dict[SubGroup, _Attempt] = {}
        self._factors: _Expected | None = None  # that this step's attempts use
        self._confident = True
        self._streams = stores.accelerator.streams
        self._stream = self._streams.current()
        there = (self._streams, self._stream)
        self._thread = ThreadPoolExecutor(1, "zero-step", initializer=_set_thread_device, initargs=there)

    def arrived(self, gradients: GroupGradients) -> None:
        """Begin to step the group's shadows; begin again if more gradient has come."""
        for owned in self._owned[gradients.group] if self._confident else ():
            shadow = self._shadows.get(owned.sub)
            if shadow is not None:
                self._give_up(owned.sub)
                step = self._plan(owned, gradients.used | gradients.locally_used)
                job = self._thread.submit(self._attempt, owned.sub, shadow, step, gradients, self._awaited())
                self._attempts[owned.sub] = _Attempt(step, owned.versions(), job)

    def dropped(self) -> None:
        """Forget what was begun, which is of no use any more. An attempt that is running may run on,
        unseen."""
        for sub in tuple(self._attempts):
            self._give_up(sub)
        self._factors = None

    def validate(self, factors: Factors) -> None:
        """A step begins: drop all attempts if its factors are not the expected ones. factors: the step's own,
        on the host."""
        if not self._shadows:
            return
        self._confident = self._awaited().equals(factors)
        if not self._confident:
            self.dropped()

    def in_turn(self, turns: Sequence[Turn]) -> list[Turn]:
        """The order to step them in: first what was not begun, then the others in the order in which they
        will be done."""
        begun = {sub: turn for turn, sub in enumerate(self._attempts)}
        return sorted(turns, key=lambda turn: begun.get(turn[0].sub, -1))

    def commit(self, owned: OwnedSubGroup, step: GroupStep) -> bool:
        """Put the shadow in the record's place if it has made `step`; returns whether it did.

        The weights are then under way. Waits for this one attempt, if it is of use.
        """
        attempt = self._attempts.get(owned.sub)
        if attempt is None:
            return False
        shadow = self._shadows[owned.sub]
        same = attempt.step == step and attempt.versions == owned.versions()
        if not same or attempt.done.exception() is not None:  # a real error comes again at the step
            self._give_up(owned.sub)
            return False
        del self._attempts[owned.sub]
        self.committed += 1
        shadow.swap_in()
        return True

    def _attempt(
        self,
        sub: SubGroup,
        shadow: ShadowRecord,
        step: GroupStep,
        gradients: GroupGradients,
        factors: _Expected,
    ) -> None:
        """Runs in the thread. Nothing is queued on its stream, so there is nothing behind it to wait for."""
        with torch.no_grad():
            gradient = gradients.slice.find()
            mine = None if gradient is None else sub.of(gradient)
            if isinstance(mine, Tensor):  # else it has been dropped meanwhile
                shadow.step(step, mine, factors.wait())

    def _awaited(self) -> _Expected:
        if self._factors is None:
            self._factors = _Expected(*map(self._to_host, self._expected()))
        return self._factors

    def _to_host(self, value: Tensor | None) -> HostCopy | None:
        return None if value is None else self._stores.carrier.to_host(value)

    def _give_up(self, sub: SubGroup) -> None:
        attempt = self._attempts.pop(sub, None)
        if attempt is not None:
            attempt.done.cancel()
            self.wasted += 1


@dataclass(frozen=True)
class _Expected:
    """Factors on their way to the host."""

    scale: HostCopy | None
    skip: HostCopy | None

    def wait(self) -> Factors:
        return Factors(*(None if value is None else value.wait() for value in (self.scale, self.skip)))

    def equals(self, factors: Factors) -> bool:
        """Whether they are the same bit for bit, except for the sign of zero."""
        mine = self.wait()
        return _same(mine.scale, factors.scale) and _same(mine.skip, factors.skip)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


_here = threading.local()


def _set_thread_device(streams: Streams, stream: Stream) -> None:
    """Put a thread that steps on this rank's device for good.

    A new thread is on the machine's first device, and leaving a stream would return it there, which takes
    memory of that device.
    """
    _here.stream = streams.use(stream)
    _here.stream.__enter__()
