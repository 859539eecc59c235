"""Which optimizer state a checkpoint can hold: told when an engine is made, and again at the first step."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zero.checkpoint import user_state
from zero.communication.communicator import Communicator
from zero.config.training import Config
from zero.errors import OptimizerError, StateError, UsageError
from zero.files.dtypes import name_of
from zero.loading.together import all_or_none
from zero.optimizer.piece_state import described, inner_tensors, is_elementwise, is_wrapper
from zero.optimizer.state_size import first_states
from zero.tiers.values import Stored


def check_first_states(
    optimizer: Optimizer, model: nn.Module, config: Config, communicator: Communicator
) -> None:
    """Raise OptimizerError, on every rank, if one has an optimizer that would keep state that no checkpoint
    can hold. Collective: ranks may have other models, as the stages of a pipeline do.

    A copy of it steps small stand-ins, so what it makes only later, or cannot make here, is found after the
    first step.
    """
    of_slices = config.whole_parameters is False and config.stage > 0 and communicator.whole.size > 1
    check = partial(_check_first_states, optimizer, model, of_slices)
    all_or_none(communicator, "the optimizer's state", check, everywhere=True, doing="check")


def _check_first_states(optimizer: Optimizer, model: nn.Module, of_slices: bool) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, stand_in, state in first_states(optimizer):
        for key, value in state.items():
            try:
                check_storable(key, value, names.get(parameter, "?"), stand_in, of_slices)
            except StateError as error:
                raise OptimizerError(str(error)) from None


def told(key: str, name: str) -> str:
    """A value of a parameter's state, for messages."""
    return f"optimizer state {key!r} of {name!r}"


def check_storable(key: str, value: Any, name: str, parameter: nn.Parameter, of_slice: bool) -> None:
    """Raise StateError for a value of a parameter's state that a checkpoint cannot hold.

    parameter: what the state is of, the parameter called `name` or a slice of it.
    """
    what = told(key, name)
    try:
        if is_wrapper(value):
            _check_wrapper(value, what, of_slice)
        elif not isinstance(value, (Tensor, Stored)):
            user_state.encode(value, "", [], what)
        elif isinstance(value, Tensor) and user_state.is_plain(value):
            name_of(value.dtype, what)
            _check_whole(key, value, what, parameter, of_slice)
        elif isinstance(value, Tensor):
            raise UsageError(f"{what} is no dense tensor of its own, but a {_kind(value)}")
    except UsageError as error:
        raise StateError(
            f"{error}. A checkpoint cannot hold it: use an optimizer whose state is plain tensors and numbers"
        ) from None


def _check_wrapper(value: Tensor, what: str, of_slice: bool) -> None:
    if of_slice:
        raise UsageError(
            f"{what} has blocks of a slice, which other ranks cannot use: whole_parameters=False"
        )
    user_state.encode(described(value, what), "", [], what)
    for name, inner in inner_tensors(value).items():
        name_of(inner.dtype, f"{what}, {name}")


def _kind(value: Tensor) -> str:
    return f"{type(value).__name__} ({value.dtype}, {value.layout})"


def _check_whole(key: str, value: Tensor, what: str, parameter: nn.Parameter, of_slice: bool) -> None:
    if value.dim() and of_slice and not is_elementwise(key, value, parameter):
        raise StateError(
            f"{what} is, for a slice, neither one value per element nor a single number, so it would be "
            "meaningless on other ranks; remove Config(whole_parameters=False)"
        )
