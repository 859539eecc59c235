"""How much state optimizers keep; for one that no kernel serves, found out by stepping a copy of it.

The copy steps small stand-ins for the parameters, whose dimensions are different primes. So the shape of what
it keeps tells how that grows with a parameter: by elements, rows, columns or squares of these. State in 8
bits and fewer has blocks, and only parameters that are large or divisible enough have it. For optimizers that
are not torch's, further copies step stand-ins that are so too, of two sizes: such state grows by the element.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelz import HOST
from zero.errors import OptimizerError
from zero.optimizer.joint import members, name_of, parameters_of
from zero.optimizer.kernel_rules import rule_for
from zero.optimizer.piece_state import is_elementwise, tensors_beside
from zero.optimizer.stepping import is_known
from zero.sharding.distributed import local_of
from zero.tiers.values import at_least_fp32

SIDES = {  # of a stand-in, by its dimensions; larger than most sizes that state has of its own
    1: (101,),
    2: (101, 103),
    3: (31, 37, 41),
    4: (11, 13, 17, 19),
    5: (7, 11, 13, 17, 19),
}
MOST = max(SIDES)  # dimensions; further ones are 1
LARGE = 1 << 14  # elements, at which every optimizer that packs state does so
LARGEST_BLOCK = 4096  # elements
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
            found.update(dict.fromkeys(parameters_of(each), len(rule.moments)))
    return found


def first_states(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, nn.Parameter, dict[str, Any]]]:
    """Yield, for each trained parameter of optimizers that are not torch's, a stand-in and the state that a
    copy of the optimizer keeps for it after a step. Those that no copy can be stepped of are left out."""
    for each in members(optimizer):
        if is_known(each):
            continue
        stand_ins = _shared_stand_ins(each, lambda p: _square(local_of(p).shape), torch.float32)
        try:
            states = _stepped(each, stand_ins)
        except OptimizerError:
            continue
        yield from ((p, small, states.get(small, {})) for p, small in stand_ins.items() if p.requires_grad)


def _square(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a stand-in whose state is packed as the parameter's is, and is no larger than needed for
    that: what is kept for rows and for columns stays small."""
    if len(shape) < 2 or math.prod(shape) <= LARGE:
        return tuple(shape) if math.prod(shape) <= LARGE else (LARGE,)
    side = math.isqrt(LARGE)
    return (*[1] * (len(shape) - 2), side, side)


def _moments_after_a_step(optimizer: Optimizer, dtype: torch.dtype | None) -> dict[nn.Parameter, float]:
    stand_ins = {p: _stand_in(_sides(p.shape), dtype or p.dtype) for p in parameters_of(optimizer)}
    states = _stepped(optimizer, stand_ins)
    found = {
        p: _values_per_element(states.get(small, {}), optimizer.state.get(p, {}), p, small)
        for p, small in stand_ins.items()
    }
    if not is_known(optimizer):
        found.update(_in_blocks(optimizer, dtype))
    return found


def _in_blocks(optimizer: Optimizer, dtype: torch.dtype | None) -> dict[nn.Parameter, float]:
    """The same for those of the parameters whose state is in 8 bits or fewer."""
    smaller = _shared_stand_ins(optimizer, lambda p: _alike(p.shape, LARGE), dtype)
    larger = _shared_stand_ins(optimizer, lambda p: _alike(p.shape, LARGE * 2), dtype)
    before, after = _packed_bytes(optimizer, smaller), _packed_bytes(optimizer, larger)
    found = {}
    for p, small in smaller.items():
        if small in before and larger[p] in after:
            grown = after[larger[p]] - before[small]
            slope = grown / max(larger[p].numel() - small.numel(), 1)
            nbytes = before[small] + slope * (p.numel() - small.numel())
            found[p] = nbytes / max(p.numel(), 1) / small.element_size()
    return found


def _shared_stand_ins(
    optimizer: Optimizer, shape_of: Callable[[nn.Parameter], tuple[int, ...]], dtype: torch.dtype | None
) -> dict[nn.Parameter, nn.Parameter]:
    """Stand-ins in these shapes; parameters of a param group that have the same shape share one."""
    made: dict[Any, nn.Parameter] = {}
    found = {}
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            key = index, shape_of(p), dtype or p.dtype
            if key not in made:
                made[key] = _stand_in(*key[1:])
            found[p] = made[key]
    return found


def _packed_bytes(
    optimizer: Optimizer, stand_ins: Mapping[nn.Parameter, nn.Parameter]
) -> dict[nn.Parameter, int]:
    """The bytes of the state of each stand-in that has some in 8 bits or fewer."""
    states = _stepped(optimizer, stand_ins)
    kept = {small: tensors_beside(states.get(small, {}), small) for small in set(stand_ins.values())}
    return {
        small: sum(tensor.nbytes for tensor in tensors)
        for small, tensors in kept.items()
        if any(tensor.dtype.itemsize == 1 for tensor in tensors)
    }


def _alike(shape: Sequence[int], least: int) -> tuple[int, ...]:
    """The shape of a stand-in that is divisible by blocks as a parameter is: the parameter's own if that is
    small, else one of at least so many elements, with as many dimensions."""
    numel = math.prod(shape)
    if numel <= LARGE * 2:
        return tuple(shape)
    like = least + numel % LARGEST_BLOCK
    return (*[1] * (len(shape) - 1), like)


def _stepped(optimizer: Optimizer, stand_ins: Mapping[nn.Parameter, nn.Parameter]) -> dict[Any, Any]:
    """The state of a copy of the optimizer that has stepped these once. Several parameters may have one
    stand-in. Raises OptimizerError if the copy cannot step."""
    try:
        probe = _copy_of(optimizer, stand_ins)
        for group in probe.param_groups:
            group["params"] = list(dict.fromkeys(group["params"]))
        with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
            type(optimizer).step(probe)
    except Exception as error:
        raise OptimizerError(
            f"the size of {name_of(optimizer)}'s state is not known, and a copy of it cannot step "
            f"({type(error).__name__}: {error}), so it can be neither planned nor held to a host_budget"
        ) from error
    return probe.state


def _stand_in(shape: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
    """A stand-in for a parameter's master, on the host, with a gradient."""
    small = nn.Parameter(torch.zeros(shape, dtype=at_least_fp32(dtype), device=HOST))
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
