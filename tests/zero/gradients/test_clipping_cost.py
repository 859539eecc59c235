"""What torch's clipping asks for: one collective, and all gradients at once."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import adamw
from zero.sharding.stand_in import ShardedGradient, StandIns
from zero.whole.held_gradients import HeldGradients


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


class OneAtATime:
    """Stands behind gradients of ones, of which no two may be whole at a time."""

    def __init__(self) -> None:
        self.put_back: list[float] = []
        self._last: Any = lambda: None

    def full(self, parameter: nn.Parameter) -> Tensor:
        assert self._last() is None
        whole = torch.ones(parameter.shape)
        self._last = weakref.ref(whole)
        return whole

    def put(self, parameter: nn.Parameter, whole: Tensor) -> None:
        self.put_back.append(float(whole.sum()))


def test_clipping_by_value_has_one_gradient_whole_at_a_time() -> None:
    parameters, held = [nn.Parameter(torch.zeros(n)) for n in (1, 2, 3)], OneAtATime()
    stand_ins = StandIns(ShardedGradient)
    stand_ins.show(parameters, cast(HeldGradients, held))
    nn.utils.clip_grad_value_(parameters, 0.5)
    assert held.put_back[-3:] == [0.5, 1.0, 1.5]
