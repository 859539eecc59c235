"""Graphs of DTensor parameters, made graphs of their local tensors.

The passes gather and reduce what lies in flat buffers, which are local tensors. So these become the inputs,
and the graph begins by making DTensors of them. Its backward ends by bringing their gradients to the
parameters' placements.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode

from zero.compiled.facts import ParameterFacts
from zero.compiled.inductor import Compiled
from zero.sharding.distributed import as_distributed, is_distributed, local_of


def take_locals(
    module: fx.GraphModule, inputs: Sequence[Any], parameters: Sequence[ParameterFacts | None]
) -> tuple[list[Any], Callable[[Compiled], Compiled]]:
    """Change dynamo's graph; return its new inputs, and what makes its compiled form take the old ones.

    parameters: the engine's among the inputs, by place.
    """
    given, taken = list(inputs), dict[int, nn.Parameter]()
    for place, parameter in enumerate(parameters):
        if parameter is not None and is_distributed(inputs[place]):
            taken[place] = inputs[place]
            given[place] = _fake_local(inputs[place], detect_fake_mode())
    placeholders = module.graph.find_nodes(op="placeholder")
    for place in taken:
        node = placeholders[place]
        with module.graph.inserting_after(placeholders[-1]):
            whole = module.graph.call_function(_distributed(taken[place]), (node,))
        node.replace_all_uses_with(whole, lambda user, whole=whole: user is not whole)
    module.recompile()
    places = frozenset(taken)
    return given, lambda compiled: _of_locals(compiled, places) if places else compiled


def _fake_local(parameter: nn.Parameter, mode: Any) -> Tensor:
    local: Tensor = mode.from_tensor(local_of(parameter), static_shapes=True)
    return local.requires_grad_(parameter.requires_grad)


def _distributed(parameter: nn.Parameter) -> Callable[[Tensor], Tensor]:
    """What makes a DTensor like the parameter of its local tensor, in a graph."""
    given: Any = parameter
    mesh, placements, shape, stride = given.device_mesh, given.placements, given.shape, given.stride()
    kind: Any = sys.modules["torch.distributed.tensor"].DTensor

    def distributed(local: Tensor) -> Tensor:
        made: Tensor = kind.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        return made

    return distributed


def _of_locals(compiled: Compiled, places: Collection[int]) -> Compiled:
    def call(*inputs: Any) -> Any:
        return compiled(*(_Local.apply(each) if n in places else each for n, each in enumerate(inputs)))

    return call


class _Local(torch.autograd.Function):
    """A parameter's local tensor, which the graph saves as it saves parameters."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter) -> Tensor:
        ctx.set_materialize_grads(False)  # the engine has taken the gradient
        ctx.parameter = parameter
        local: Any = local_of(parameter).detach()
        local._is_param = True
        found: Tensor = local
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else as_distributed(ctx.parameter, gradient)
