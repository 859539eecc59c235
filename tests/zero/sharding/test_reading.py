"""Reading a sharded parameter: metadata as ever, an error that says how for its values, and never a crash."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.models import LanguageModel, tokens
from tests.zero.helpers.training import adamw


def reading_body(context: Context) -> dict[str, str]:
    """Everything that a user may try with a sharded parameter."""
    import copy
    import pickle

    model = LanguageModel()
    engine = zero.initialize(model, adamw(model), zero.Config(timeout=10))
    weight = model.blocks[0].up.weight
    assert isinstance(weight, nn.Parameter)
    attempts: dict[str, Any] = {
        "arithmetic": lambda: weight + 1,
        "reverse": lambda: torch.ones(1) * weight,
        "matmul": lambda: torch.ones(1, weight.shape[0]) @ weight,
        "index": lambda: weight[0],
        "item": lambda: weight.sum().item(),
        "data": lambda: weight.data,
        "assign data": lambda: setattr(weight, "data", torch.zeros(3)),
        "detach": weight.detach,
        "numpy": weight.numpy,
        "tolist": weight.tolist,
        "float": weight.float,
        "to": lambda: weight.to(torch.float64),
        "cpu": weight.cpu,
        "in place": weight.zero_,
        "norm": lambda: torch.linalg.vector_norm(weight),
        "functional": lambda: nn.functional.linear(torch.ones(1, weight.shape[1]), weight),
        "stack": lambda: torch.stack([weight, weight]),
        "print data": lambda: f"{weight:.3f}",
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.dumps(weight),
        "state_dict": model.state_dict,
        "half": model.half,
        "forward": lambda: model.blocks[0].up.forward(torch.zeros(1, 12)),
        "equal": lambda: torch.equal(weight, weight),
        "iterate": lambda: list(weight),
        "data pointer": weight.data_ptr,
    }
    result = {}
    for name, call in attempts.items():
        try:
            call()
            result[name] = "nothing raised"
        except zero.ShardedParameterError as error:
            result[name] = str(error)
    metadata = (
        tuple(weight.shape), weight.dtype, weight.device.type, weight.numel(), weight.dim(), weight.size(0),
        weight.requires_grad, weight.is_leaf, weight.grad, weight.is_contiguous(), weight.element_size(),
        len(weight), weight.stride(), isinstance(weight, nn.Parameter), weight in {weight},
    )  # fmt: skip
    result["metadata"] = str(metadata)
    result["repr"] = repr(weight)
    model.zero_grad()
    model.blocks[0].requires_grad_(True)
    engine.backward(model(tokens(0, context.rank, model))["loss"])
    result["still works"] = str(engine.step())
    return result


def test_reading_a_sharded_parameter(cluster: Clusters, device: str) -> None:
    for found in cluster(2).run(reading_body):
        metadata = found.pop("metadata")
        assert metadata == (
            f"((29, 12), torch.float32, '{device}', 348, 2, 29, True, True, None, True, 4, 29, (12, 1), "
            "True, True)"
        )
        assert found.pop("repr") == (
            "ShardedParameter('blocks.0.up.weight', shape=(29, 12), dtype=torch.float32)"
        )
        assert found.pop("still works") == "True"
        for name, message in found.items():
            assert "zero.gathered" in message, (name, message)
            if name not in ("deepcopy", "state_dict", "half"):
                assert "'blocks.0.up.weight'" in message, (name, message)
