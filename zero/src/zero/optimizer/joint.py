"""Several optimizers for one model, as one: Muon for the hidden matrices, say, and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zero.errors import OptimizerError


class JointOptimizer(Optimizer):
    """Has the param_groups of all its optimizers, as the same objects. The engine steps them. Without
    optimizers, it stands for none.

    The optimizers stay the user's: schedulers and hooks of each keep working. state: what they had when they
    were joined.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        _check_distinct(optimizers)
        super().__init__([{"params": [p for optimizer in optimizers for p in parameters_of(optimizer)]}], {})
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for optimizer in optimizers:
            self.state.update(optimizer.state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.optimizers))})"


def joint(optimizer: Optimizer | Sequence[Optimizer] | None) -> Optimizer:
    """Make one optimizer of one, of several, or of None. Raises OptimizerError for an empty list and for what
    is no optimizer."""
    if optimizer is None:
        return JointOptimizer(())
    found: Sequence[Any] = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not found:
        raise OptimizerError("the list of optimizers is empty")
    for each in found:
        if not isinstance(each, Optimizer):
            raise OptimizerError(
                f"expected a torch.optim.Optimizer or a list of them, got {type(each).__name__}; "
                "pass e.g. torch.optim.AdamW(model.parameters(), lr=3e-4)"
            )
    only: Optimizer = found[0] if len(found) == 1 else JointOptimizer(found)
    return only


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters in an optimizer's param_groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def members(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The user's own optimizers."""
    return optimizer.optimizers if isinstance(optimizer, JointOptimizer) else (optimizer,)


def name_of(*optimizers: Optimizer) -> str:
    """The optimizers' class names, for messages."""
    return " and ".join(type(each).__name__ for optimizer in optimizers for each in members(optimizer))


def kind_of(optimizer: Optimizer) -> str:
    """The full name of the optimizer's class; of several optimizers, each one's."""
    return " + ".join(map(_kind, members(optimizer))) or "no optimizer"


def kinds_of_groups(optimizer: Optimizer) -> list[str]:
    """The class of each param_group's optimizer."""
    return [_kind(each) for each in members(optimizer) for _ in each.param_groups]


def _kind(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _check_distinct(optimizers: Sequence[Optimizer]) -> None:
    owner: dict[Any, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            other = owner.setdefault(parameter, optimizer)
            if other is not optimizer:
                raise OptimizerError(
                    f"a parameter of shape {tuple(parameter.shape)} is in two optimizers, "
                    f"{type(other).__name__} and {type(optimizer).__name__}: give it to one of them"
                )
