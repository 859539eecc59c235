"""How much state optimizers keep; for one that no kernel serves, found out by stepping a copy of it.

The copy steps small stand-ins for the parameters, whose dimensions are different primes. So the shape of what
it keeps tells how that grows with a parameter: by elements, rows, columns or squares of these.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelz import HOST
from zero.errors import OptimizerError
from zero.optimizer.joint import members, name_of
from zero.optimizer.kernel_rules import rule_for
from zero.optimizer.piece_state import is_elementwise, tensors_beside
from zero.tiers.values import at_least_fp32

SIDES = {  # of a stand-in, by its dimensions; larger than most sizes that state has of its own
    1: (101,),
    2: (101, 103),
    3: (31, 37, 41),
    4: (11, 13, 17, 19),
    5: (7, 11, 13, 17, 19),
}
MOST = max(SIDES)  # dimensions; further ones are 1
FOR_DEVICES = ("capturable", "differentiable", "foreach", "fused")  # options that change no state


def moments_of(optimizer: Optimizer, dtype: torch.dtype | None = None) -> dict[nn.Parameter, float]:
    """Values that are kept beside the master per element of each parameter: an average, in values of the
    master's size.

    dtype: what parameters are cast to before; None leaves them as they are. Raises OptimizerError where a
    copy of an optimizer cannot be stepped.
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
            f"the size of {name_of(optimizer)}'s state is not known, and a copy of it cannot step "
            f"({type(error).__name__}: {error}), so it can be neither planned nor held to a host_budget"
        ) from error
    return {
        p: _values_per_element(probe.state[small], optimizer.state.get(p, {}), p, small)
        for p, small in stand_ins.items()
    }


def _stand_in(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """A stand-in for a parameter's master: small, with as many dimensions, on the host, with a gradient."""
    wide = at_least_fp32(dtype)
    small = nn.Parameter(torch.zeros(_sides(parameter.shape), dtype=wide, device=HOST))
    small.grad = torch.zeros_like(small)
    return small


def _sides(shape: Sequence[int]) -> list[int]:
    """The sides of a stand-in, in the order of the parameter's sizes, so that an optimizer that looks at the
    shorter one does so here too. A size of 1 stays 1."""
    real = tuple(shape) or (2,)
    found = [1] * len(real)
    long = sorted((place for place, size in enumerate(real) if size != 1), key=lambda place: real[place])
    for place, side in zip(long, SIDES[min(len(real), MOST)], strict=False):
        found[place] = side
    return found


def _copy_of(optimizer: Optimizer, stand_ins: Mapping[nn.Parameter, nn.Parameter]) -> Optimizer:
    """The optimizer as it is, with stand-ins for its parameters and without anybody's hooks."""
    own = {k: v for k, v in vars(optimizer).items() if k not in ("state", "step") and "_hooks" not in k}
    content = copy.deepcopy(own, {id(p): small for p, small in stand_ins.items()})
    first = {small: _shrunk(optimizer.state.get(p, {}), p, small) for p, small in stand_ins.items()}
    for options in (content["defaults"], *content["param_groups"]):
        options.update(dict.fromkeys(options.keys() & set(FOR_DEVICES), False))
    probe: Optimizer = object.__new__(type(optimizer))
    Optimizer.__setstate__(probe, {**content, "state": defaultdict(dict, first)})
    return probe


def _shrunk(state: Mapping[str, Any], parameter: nn.Parameter, small: nn.Parameter) -> dict[str, Any]:
    """The state that an optimizer has before its first step, in the size of a stand-in."""
    return {
        key: torch.zeros_like(small, dtype=small.dtype if value.is_floating_point() else value.dtype)
        if isinstance(value, Tensor) and is_elementwise(key, value, parameter)
        else copy.deepcopy(value)
        for key, value in state.items()
    }


def _values_per_element(
    state: dict[str, Any], first: dict[str, Any], parameter: nn.Parameter, small: nn.Parameter
) -> float:
    """Values that the state has per element of the parameter. first: the parameter's state before any step;
    of that, what is not element-wise keeps its size."""
    fixed = {value.shape for value in tensors_beside(first, parameter)} - {parameter.shape}
    nbytes = 0
    for value in tensors_beside(state, small):
        if value.shape == small.shape:
            numel = parameter.numel()
        else:
            numel = (
                value.numel() if value.shape in fixed else _numel(value.shape, small.shape, parameter.shape)
            )
        nbytes += value.element_size() * numel
    return nbytes / max(parameter.numel(), 1) / small.element_size()


def _numel(shape: Sequence[int], sides: Sequence[int], real: Sequence[int]) -> int:
    """Elements that state of `shape`, kept for a stand-in, has for the parameter itself. A length may contain
    a side twice."""
    numel = 1
    for length in shape:
        rest = length
        for side, size in zip(sides, real, strict=False):
            for _ in range(2):
                if side > 1 and rest and rest % side == 0:
                    rest, numel = rest // side, numel * size
        numel *= rest
    return numel
