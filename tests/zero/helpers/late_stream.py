"""Training on the only stream that a simulated device runs late, which reveals what does not wait for it.

In the other tests it is the reverse: computation happens at once, and the engine's own streams are late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelz.conformance.cluster import Clusters, Context
from tests.simulated import faults_of

Body = Callable[..., Any]


def on_a_late_stream(context: Context, inner: Body, **arguments: Any) -> Any:
    streams = context.accelerator.streams
    late = streams.new()
    with streams.use(late), faults_of(context.accelerator).late_stream(late.native):  # type: ignore[attr-defined]
        return inner(context, **arguments)


def run_late(cluster: Clusters, size: int, body: Body, **arguments: Any) -> list[Any]:
    return cluster(size).run(on_a_late_stream, inner=body, limit=180, **arguments)
