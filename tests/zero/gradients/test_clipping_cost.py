"""What torch's clipping asks for: one collective, and all gradients at once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import adamw
from zero.sharding.stand_in import ShardedGradient


class Calls(TorchFunctionMode):
    """Counts the functions that are called with stand-ins."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.__name__] += any(issubclass(kind, ShardedGradient) for kind in types)
        return func(*args, **(kwargs or {}))


def traffic_body(context: Context) -> tuple[int, int, int]:
    """Collectives of a clipping, and of a step in which it is asked once more; what that asked of gradients
    one by one."""
    model = fresh()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=30))
    engine.backward(language_loss(model, 0, context.rank))
    before = sum(engine.traffic.calls.values())
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    clipped = sum(engine.traffic.calls.values())
    with Calls() as calls:
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    one_by_one = calls.names["vector_norm"] + calls.names["linalg_vector_norm"] + calls.names["mul_"]
    assert calls.names["_foreach_norm"] == calls.names["_foreach_mul_"] == 1
    return clipped - before, sum(engine.traffic.calls.values()) - clipped, one_by_one


def test_clipping_takes_one_collective_for_all_parameters(cluster: Clusters) -> None:
    assert cluster(2).run(traffic_body) == [(1, 0, 0)] * 2
