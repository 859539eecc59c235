"""What repeats operations is switched off however a forward or backward ends, and on again for the next."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.layers import WIDTH, build, one_step
from zero.memory import oom_retry


class Noting(nn.Module):
    """Knows whether operations passed through Python in its last forward. during: called in it."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = False
        self.during: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.watched = is_on()
        self.during()
        return x + 1


def is_on() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0


def stop() -> None:
    raise KeyboardInterrupt


class Interrupt:
    """Traces this thread, and raises a KeyboardInterrupt at the nth line of `oom_retry` that it comes to."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != oom_retry.__file__:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                stop()
        return self


def is_interrupted(call: Callable[[], Any], nth: int) -> bool:
    """Whether the call has so many lines of `oom_retry`, and was interrupted at the nth."""
    before = sys.gettrace()
    sys.settrace(Interrupt(nth))
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


class Case:
    """A model within a model, whose every forward is larger than those before."""

    def __init__(self, context: Context) -> None:
        self.inner = Noting()
        self._device = context.accelerator.device
        self._model = nn.Sequential(self.inner)
        self._rows = itertools.count(1)
        self._trying = oom_retry.OomRetry(context.accelerator, lambda: 1, lambda: 1)
        self._trying.wrap([self._model, self.inner])

    def forward(self) -> None:
        self._model(torch.ones(next(self._rows), 1024, device=self._device))

    def backward(self) -> None:
        with self._trying.on():
            self.inner.during()


def inside_body(context: Context) -> list[bool]:
    """On or off in a forward, and behind what has been interrupted inside."""
    case, found = Case(context), []
    for call in (case.forward, case.backward):
        case.inner.during = stop
        with pytest.raises(KeyboardInterrupt):
            call()
        found.append(is_on())
        case.inner.during = lambda: None
        case.forward()
        found += [case.inner.watched, is_on()]
    return found


def test_an_interrupt_inside_switches_it_off(cluster: Clusters) -> None:
    assert cluster(1).run(inside_body) == [[False, True, False] * 2]


def anywhere_body(context: Context) -> tuple[int, list[tuple[str, int]]]:
    """How many lines an interrupt may come to, and those that leave it wrong behind the next backward."""
    case, places, wrong = Case(context), 0, []
    for name in ("forward", "backward"):
        for nth in itertools.count(1):
            if not is_interrupted(getattr(case, name), nth):
                break
            places += 1
            case.backward()
            off = not is_on()
            case.forward()
            if not (off and case.inner.watched and not is_on()):
                wrong.append((name, nth))
    return places, wrong


def test_an_interrupt_anywhere_is_over_with_the_next_backward(cluster: Clusters) -> None:
    """At any line, those that switch it on and off among them."""
    for places, wrong in cluster(1).run(anywhere_body):
        assert places > 20
        assert wrong == []


def run_out(_: Tensor) -> None:
    raise torch.OutOfMemoryError("no room for a gradient")


def again_body(context: Context) -> None:
    """A plain backward that finds no room is run again, after state has left the device."""
    losses = []
    for fails in (False, True):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine = zero.initialize(model, optimizer, zero.Config(precision="bf16", offload="auto", timeout=20))
        for step in range(4):
            one_step(engine, step)
        x = torch.ones(3, WIDTH, device=engine.device)
        if fails:
            assert "device" in tiers(engine)
            hook = model[3].register_forward_hook(lambda *given: given[-1].register_hook(run_out) and None)
            with pytest.raises(torch.OutOfMemoryError):
                model(x).sum().backward()
            hook.remove()
            with pytest.warns(RuntimeWarning, match="run its micro-batches again"):
                model(x)
            assert "device" not in tiers(engine)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(one_step(engine, 5))
    # State that has left the device is stepped by the host's kernels, which may round otherwise.
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def tiers(engine: zero.Engine) -> set[str]:
    return {sub.record.tier.name for unit in engine.units for group in unit.groups for sub in group.subs}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.usefixtures("apart")
def test_state_makes_room_for_a_plain_backward_that_is_run_again(cluster: Clusters, size: int) -> None:
    cluster(size).run(again_body)
