"""How each parameter is stepped: by a kernel, or by the user's optimizer itself, in slices or whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.optim import Optimizer

from zero.config.training import Config
from zero.optimizer.joint import members, parameters_of
from zero.optimizer.kernel_rules import RULES, SERVED, Rule, rule_for
from zero.optimizer.routes import share_out
from zero.sharding.distributed import blocks_of, divided_along
from zero.sharding.flat_group import FlatGroup

LOOKS_AT_MATRICES = {"Adafactor", "Muon"}


@dataclass(frozen=True)
class Stepping:
    """How a parameter is stepped. rule: of the kernel; None where its optimizer steps it. whole: whether the
    whole parameter is stepped, even where ranks have slices of it. across: dimensions of the job's mesh along
    which ranks have blocks of it, which are put together for that."""

    rule: Rule | None = None
    whole: bool = False
    across: frozenset[str] = frozenset()


@dataclass(frozen=True)
class GroupStepping(Stepping):
    """How all parameters of a group are stepped. stepped_by: the rank that steps each of them whole, of those
    that have its slices and blocks; None where every rank steps what it has."""

    stepped_by: tuple[int, ...] | None = None


def steppings(optimizer: Optimizer, config: Config) -> dict[nn.Parameter, Stepping]:
    """How each parameter of the optimizer, or of one of several, is stepped."""
    found = {}
    for each in members(optimizer):
        way, needs_whole = _of(each, config), _needs_whole(each, config)
        for parameter in parameters_of(each):
            across = frozenset(divided_along(parameter) if needs_whole else ())
            found[parameter] = replace(way, whole=True, across=across) if across else way
    return found


def of_param_groups(optimizer: Optimizer, config: Config) -> list[Stepping]:
    """How each param group is stepped, which ranks have to agree on."""
    ways = ((_of(each, config), each.param_groups) for each in members(optimizer))
    return [way for way, groups in ways for _ in groups]


def of_unknown(known: dict[nn.Parameter, Stepping], config: Config) -> Stepping:
    """How parameters that no optimizer knows are treated: like others, so that they need no buffers of their
    own. Where there is no optimizer yet, as by the kernel that most have."""
    others = (stepping for stepping in known.values() if not stepping.whole)
    return next(others, Stepping() if known else Stepping(RULES[0].keeping(config.moments, config.masters)))


def ways_of(parameters: Iterable[nn.Parameter], known: Mapping[nn.Parameter, Stepping]) -> set[Stepping]:
    """How these parameters are stepped, those that an optimizer knows."""
    return {known[parameter] for parameter in parameters if parameter in known}


def group_steppings(
    groups: Sequence[FlatGroup], known: dict[nn.Parameter, Stepping], config: Config
) -> dict[FlatGroup, GroupStepping]:
    """How trainable groups are stepped, each in one way. known: how parameters are; empty if nothing is."""
    others = of_unknown(known, config) if known else Stepping()
    kinds = {group: next(iter(ways_of(group.parameters, known)), others) for group in groups}
    by = stepping_ranks((way, group.shards, group.parameters) for group, way in kinds.items())
    return {
        group: GroupStepping(
            **vars(way), stepped_by=tuple(by[p] for p in group.parameters if p in by) or None
        )
        for group, way in kinds.items()
    }


def stepping_ranks(groups: Iterable[tuple[Stepping, int, Sequence[nn.Parameter]]]) -> dict[nn.Parameter, int]:
    """Which rank steps each parameter that is stepped whole, of those that have parts of it; none of
    parameters that one rank has.

    groups: all of a model: how each is stepped, in how many slices it is, and its parameters.
    """
    parts = [
        (p, slices * blocks_of(p) if way.across else slices)
        for way, slices, parameters in groups
        if way.whole
        for p in parameters
    ]
    return share_out((p, p.numel(), count) for p, count in parts if count > 1)


def _of(optimizer: Optimizer, config: Config) -> Stepping:
    rule = rule_for(optimizer)
    if rule is not None:
        return Stepping(rule.keeping(config.moments, config.masters))
    return Stepping(whole=config.stage > 0 and _needs_whole(optimizer, config))


def _needs_whole(optimizer: Optimizer, config: Config) -> bool:
    """Whether an optimizer must be given whole parameters."""
    if rule_for(optimizer) is not None or config.whole_parameters is False:
        return False
    return bool(config.whole_parameters) or not goes_by_element(optimizer)


def goes_by_element(optimizer: Optimizer) -> bool:
    """Whether it is known that stepping a slice gives a slice of the whole step."""
    bases = {base.__name__ for base in type(optimizer).__mro__}
    return is_known(optimizer) and not LOOKS_AT_MATRICES & bases


def is_known(optimizer: Optimizer) -> bool:
    """Whether the optimizer is known to step every parameter by itself."""
    kind = type(optimizer)
    return kind in SERVED or f"{kind.__module__}.".startswith("torch.optim.")
