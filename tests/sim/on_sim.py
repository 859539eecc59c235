"""Tests whose body runs on the simulated device in another process, so that torch here is unaffected."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from accelz import Accelerator
from accelz.conformance.cluster import Clusters, Context

Body = Callable[[Accelerator], None]


def on_sim(body: Body) -> Callable[[Clusters], None]:
    """Make a test of `body(accelerator)`, run by the one rank of a job on sim."""

    def test(sim: Clusters) -> None:
        sim(1).run(_run, module=body.__module__, name=body.__name__)

    test.__doc__ = body.__doc__
    test.body = body  # type: ignore[attr-defined]
    return test


def _run(context: Context, module: str, name: str) -> None:
    test: Any = getattr(import_module(module), name)
    test.body(context.accelerator)
