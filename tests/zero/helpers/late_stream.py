"""Training on the only stream that the simulated device runs late, which reveals what does not wait for it.

In the other tests it is the reverse: computation happens at once, and the engine's own streams are late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from accelz.conformance.cluster import Clusters, Context

LATE = "only a simulated device says which of its streams is late"
Body = Callable[..., dict[str, Any]]


def on_a_late_stream(context: Context, inner: Body, **arguments: Any) -> dict[str, Any]:
    from accelz_sim import faults

    streams = context.accelerator.streams
    late = streams.new()
    with streams.use(late), faults.late_stream(late.native):  # type: ignore[attr-defined]
        return inner(context, **arguments)


def run_late(cluster: Clusters, device: str, size: int, body: Body, **arguments: Any) -> list[dict[str, Any]]:
    if device != "sim":
        pytest.skip(LATE)
    return cluster(size).run(on_a_late_stream, inner=body, limit=180, **arguments)
