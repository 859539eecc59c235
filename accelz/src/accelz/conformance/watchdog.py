"""Ends a test that hangs, and blames the method of the backend that does not return.

A signal interrupts what Python can interrupt, and the run goes on. A call that hangs inside a library has to
be ended from outside: `runner` ends a process that reports nothing for twice as long.
"""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from accelz.conformance import progress
from accelz.conformance.contract import ContractBroken

AGAIN_SECONDS = 1.0
"""The interval at which the error is raised again, in case somebody has caught it."""


class Watchdog:
    """seconds: how long a test, its setup or its teardown may take."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, Any, Any]:
        with self._limit():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        with self._limit():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, Any, Any]:
        with self._limit():
            return (yield)

    @contextmanager
    def _limit(self) -> Iterator[None]:
        if signal.getitimer(signal.ITIMER_REAL)[0]:  # somebody else's limit, such as pytest-timeout's
            yield
            return
        before = signal.signal(signal.SIGALRM, self._bark)
        signal.setitimer(signal.ITIMER_REAL, self._seconds, AGAIN_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _bark(self, *_: Any) -> None:
        method = progress.now()
        if method:
            raise ContractBroken(method, "must return", f"it was still running after {self._seconds:g} s")
        raise TimeoutError(f"the test still ran after {self._seconds:g} s, in no method of the backend")
