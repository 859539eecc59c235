"""How much state optimizers keep; of one that no kernel serves, found out by stepping a copy of it.

The copy steps small stand-ins of the parameters, whose dimensions are different primes: so the shape of what
it keeps tells how that grows with a parameter, whether by elements, rows, columns or squares of these.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelz.flat_buffer import HOST
from zero.errors import OptimizerError
from zero.optimizer.joint import members, name_of
from zero.optimizer.kernel_rules import rule_for
from zero.optimizer.piece_state import is_elementwise, kept_tensors

SIDES = (
    5,
    7,
    11,
    13,
    17,
)  # of a stand-in; larger than the sizes that state has of itself. Further ones are 1
FOR_DEVICES = ("capturable", "differentiable", "foreach", "fused")  # options that change no state


def moments_of(optimizer: Optimizer, dtype: torch.dtype | None = None) -> dict[nn.Parameter, float]:
    """Values of the master's size that are kept beside it for an element of each parameter, on average.

    dtype: that parameters are cast to before; None leaves them theirs. Raises OptimizerError where a copy of
    an optimizer cannot be stepped.
    """
    found: dict[nn.Parameter, float] = {}
    for each in members(optimizer):
        rule = rule_for(each)
        if rule is None:
            found.update(_moments_after_a_step(each, dtype))
        else:
            kept = len(rule.moments)
            found.update((p, kept) for group in each.param_groups for p in group["params"])
    return found


def _moments_after_a_step(optimizer: Optimizer, dtype: torch.dtype | None) -> dict[nn.Parameter, float]:
    stand_ins = {
        p: _stand_in(p, dtype or p.dtype) for group in optimizer.param_groups for p in group["params"]
    }
    probe = _copy_of(optimizer, stand_ins)
    try:
        with torch.random.fork_rng(devices=[]):
            type(optimizer).step(probe)
    except Exception as error:
        raise OptimizerError(
            f"how much state {name_of(optimizer)} keeps is not known, and a copy of it does not step "
            f"({type(error).__name__}: {error}). So it can neither be planned nor held to a host_budget"
        ) from error
    return {p: _values_per_element(probe.state[small], p, small) for p, small in stand_ins.items()}


def _stand_in(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Of a parameter's master: small, of as many dimensions, on the host, with a gradient."""
    wide = torch.promote_types(dtype, torch.float32)
    further = max(parameter.dim(), 1) - len(SIDES)
    sides = (*SIDES, *(1 for _ in range(further)))[: max(parameter.dim(), 1)]
    small = nn.Parameter(torch.zeros(sides, dtype=wide, device=HOST))
    small.grad = torch.zeros_like(small)
    return small


def _copy_of(optimizer: Optimizer, stand_ins: Mapping[nn.Parameter, nn.Parameter]) -> Optimizer:
    """The optimizer as it is, with its stand-ins for parameters and without anybody's hooks."""
    own = {k: v for k, v in vars(optimizer).items() if k not in ("state", "step") and "_hooks" not in k}
    content = copy.deepcopy(own, {id(p): small for p, small in stand_ins.items()})
    first = {small: _shrunk(optimizer.state.get(p, {}), p, small) for p, small in stand_ins.items()}
    for options in (content["defaults"], *content["param_groups"]):
        options.update(dict.fromkeys(options.keys() & set(FOR_DEVICES), False))
    probe: Optimizer = object.__new__(type(optimizer))
    Optimizer.__setstate__(probe, {**content, "state": defaultdict(dict, first)})
    return probe


def _shrunk(state: Mapping[str, Any], parameter: nn.Parameter, small: nn.Parameter) -> dict[str, Any]:
    """State that an optimizer has before its first step, as a stand-in has it."""
    return {
        key: torch.zeros_like(small, dtype=value.dtype)
        if isinstance(value, Tensor) and is_elementwise(key, value, parameter)
        else copy.deepcopy(value)
        for key, value in state.items()
    }


def _values_per_element(state: dict[str, Any], parameter: nn.Parameter, small: nn.Parameter) -> float:
    nbytes = sum(
        value.element_size() * _numel(value.shape, parameter.shape)
        if value.shape != small.shape
        else value.element_size() * parameter.numel()
        for value in kept_tensors(state, small)
    )
    return nbytes / max(parameter.numel(), 1) / small.element_size()


def _numel(shape: Sequence[int], real: Sequence[int]) -> int:
    """Elements of a state of `shape`, of a stand-in, for a parameter of the shape `real`."""
    numel = 1
    for length in shape:
        rest = length
        for side, size in zip(SIDES, real, strict=False):
            while rest and rest % side == 0:
                rest, numel = rest // side, numel * size
        numel *= rest
    return numel
