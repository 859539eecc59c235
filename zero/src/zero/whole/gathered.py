"""`zero.gathered`: sharded parameters made whole for the length of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero.deferred import deferred_init
from zero.errors import UsageError
from zero.sharding.forms import leaves_of
from zero.sharding.guard import NAME_ATTRIBUTE, OWNER_ATTRIBUTE, ShardedParameter, detachable
from zero.sharding.lifetime import UncopiedRef
from zero.whole.full_parameters import FullParameters

_WRITTEN_ATTRIBUTE = "_zero_written"
"""Key in a parameter's __dict__ of its version after a `gathered` block has last written it back. The block
may lie inside another one."""


def mark_parameters(model: nn.Module, full: FullParameters) -> None:
    """Mark the model's parameters as owned by an engine; modules hold its FullParameters.

    From now on the model's `load_state_dict()` raises UsageError, except inside `gathered`: at 16 bits the
    masters would bring the old values back in the next step.
    """
    owner = UncopiedRef(full)
    for parameter in model.parameters():
        for each in (parameter, *leaves_of(parameter)):
            each.__dict__[OWNER_ATTRIBUTE] = owner
    for module in model.modules():
        if module._parameters and OWNER_ATTRIBUTE not in module.__dict__:
            module.register_load_state_dict_pre_hook(_refuse_to_load)
        if module._parameters:
            module.__dict__[OWNER_ATTRIBUTE] = full


def gathered(
    parameters: nn.Parameter | nn.Module | Iterable[nn.Parameter], write_rank: int | None = None
) -> _Block:
    """Make parameters, or all parameters of a module, whole inside the block. Collective.

    write_rank: the rank that may change the values in place (under torch.no_grad()); when the block ends, its
    values go to every rank's shards and fp32 masters. Without it the values are read-only, and a change
    raises UsageError. Parameters that no engine owns are left alone. A model's `state_dict()` in the block
    has all its names, and whatever is not gathered raises once it is read. If a block that has changed
    parameters
    which are always whole (stages 0 to 2) raises, the engine refuses to go on, as after an interrupted step.
    A graph of torch.compile breaks here.
    """
    # As from model.parameters(): as a decorator, the block is entered often.
    if isinstance(parameters, Iterator):
        parameters = list(parameters)
    return _Block(lambda: _gathered(parameters, write_rank))


class _Block(ContextDecorator):
    """A context manager that dynamo does not trace on entry and exit.

    make: makes the context manager to enter, a new one each time.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        block = self._make()
        _outside_of_graphs(block.__enter__)
        self._entered.append(block)

    def __exit__(self, *error: Any) -> bool | None:
        left: bool | None = _outside_of_graphs(self._entered.pop().__exit__, *error)
        return left


def _outside_of_graphs(call: Callable[..., Any], *arguments: Any) -> Any:
    """Make a call that dynamo does not trace.

    `disable` is not used as a decorator because dynamo takes seconds to import and only engines need it.
    """
    return torch.compiler.disable(call)(*arguments)


@contextmanager
def _gathered(
    parameters: nn.Parameter | nn.Module | Iterable[nn.Parameter], write_rank: int | None
) -> Iterator[None]:
    owners = _by_owner(parameters)
    for full in owners:
        _check_rank(full, write_rank)
    names = {full: [p.__dict__[NAME_ATTRIBUTE] for p in mine] for full, mine in owners.items()}
    held: list[FullParameters] = []
    versions: dict[nn.Parameter, int] = {}
    try:
        for full, mine in names.items():
            full.hold(mine)
            held.append(full)
        versions = {p: p._version for mine in owners.values() for p in mine}
        with detachable():
            yield
        if write_rank is None:
            for full, mine in names.items():
                full.check_shapes(mine)
            _check_unchanged(versions)
        else:
            for full, mine in names.items():
                full.write_back(mine, write_rank)
            for parameter in versions:
                parameter.__dict__[_WRITTEN_ATTRIBUTE] = parameter._version
    except BaseException:
        if write_rank is not None:
            _tell_of_changes(versions)
        raise
    finally:
        for full in held:
            full.unhold(names[full])


def _by_owner(
    parameters: nn.Parameter | nn.Module | Iterable[nn.Parameter],
) -> dict[FullParameters, list[nn.Parameter]]:
    """Return the sharded ones among `parameters`, by the engine that owns them."""
    if isinstance(parameters, nn.Parameter):
        listed: Iterable[nn.Parameter] = [parameters]
    else:
        listed = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
        listed = _only_parameters(listed)
    owners: dict[FullParameters, list[nn.Parameter]] = {}
    for parameter in dict.fromkeys(leaf for each in listed for leaf in leaves_of(each)):
        if deferred_init.is_deferred(parameter):
            raise UsageError("parameters made under zero.init() have no values before zero.initialize")
        owner = parameter.__dict__.get(OWNER_ATTRIBUTE)
        full = None if owner is None else owner()
        if full is not None:
            owners.setdefault(full, []).append(parameter)
        elif isinstance(parameter, ShardedParameter):
            raise UsageError(
                "a sharded parameter's module and its engine no longer exist, so it has no values"
            )
    return owners


def _only_parameters(given: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    listed = list(given) if isinstance(given, Iterable) else [given]
    stranger = next((each for each in listed if not isinstance(each, Tensor)), None)
    if stranger is not None:
        raise UsageError(
            f"zero.gathered takes parameters or a module, got {type(stranger).__name__}; e.g. "
            "zero.gathered(model.head.weight), zero.gathered(model)"
        )
    return listed


def _refuse_to_load(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        own = {} if parameter is None or prefix + name not in state else leaves_of(parameter)[0].__dict__
        full = own[OWNER_ATTRIBUTE]() if OWNER_ATTRIBUTE in own else None
        if full is not None and not full.locate(own[NAME_ATTRIBUTE])[0].held_exact:
            raise UsageError(
                "model.load_state_dict() would change at most this rank's whole values, not what the engine "
                "steps: call engine.load_state_dict(state), which uses rank 0's state, or load inside `with "
                "zero.gathered(model, write_rank=0):`"
            )


def _check_rank(full: FullParameters, write_rank: int | None) -> None:
    size = full.communicator.group.size
    if write_rank is not None and not 0 <= write_rank < size:
        raise UsageError(f"write_rank={write_rank} is not a rank of this job of {size}")


def _check_unchanged(versions: Mapping[nn.Parameter, int]) -> None:
    for name, full in _changed(versions):
        fate = "the change is lost"
        if full.locate(name)[0].resident:
            fate = "this rank has the change, but the masters and other ranks may not"
        raise UsageError(
            f"parameter {name!r} was changed inside zero.gathered(); {fate} unless you pass "
            "write_rank=<the rank that writes>"
        )


def _tell_of_changes(versions: Mapping[nn.Parameter, int]) -> None:
    """Interrupt the engine, after an error, if parameters that are always whole were changed.

    This rank may be the only one that has the new values.
    """
    for name, full in _changed(versions):
        if full.locate(name)[0].resident:
            full.integrity.interrupt()


def _changed(versions: Mapping[nn.Parameter, int]) -> Iterator[tuple[str, FullParameters]]:
    """Yield the names of parameters whose version has changed, with the FullParameters they belong to.

    A block inside that wrote them back does not count.
    """
    for parameter, version in versions.items():
        full = parameter.__dict__[OWNER_ATTRIBUTE]()
        known = (version, parameter.__dict__.get(_WRITTEN_ATTRIBUTE))
        if parameter._version not in known and full is not None:
            yield parameter.__dict__[NAME_ATTRIBUTE], full
