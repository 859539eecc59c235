"""How each parameter is stepped: by a kernel, or by the user's optimizer itself, in slices or whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from zero.config.training import Config
from zero.optimizer.joint import members
from zero.optimizer.kernel_rules import RULES, SERVED, Rule, rule_for

LOOKS_AT_MATRICES = {"Adafactor", "Muon"}


@dataclass(frozen=True)
class Stepping:
    """How a parameter is stepped. rule: of the kernel; None where its optimizer steps it. whole: whether the
    whole parameter is stepped, even where ranks have slices of it."""

    rule: Rule | None = None
    whole: bool = False


@dataclass(frozen=True)
class GroupStepping:
    """How a group is stepped. rule: of the kernel, if one serves. stepped_by: the rank that steps each
    parameter whole; None where every rank steps what it has."""

    rule: Rule | None
    stepped_by: tuple[int, ...] | None = None


def steppings(optimizer: Optimizer, config: Config) -> dict[nn.Parameter, Stepping]:
    """How each parameter of the optimizer, or of one of several, is stepped."""
    ways = zip(optimizer.param_groups, of_param_groups(optimizer, config), strict=True)
    return {parameter: way for group, way in ways for parameter in group["params"]}


def of_param_groups(optimizer: Optimizer, config: Config) -> list[Stepping]:
    """How each param group is stepped, which ranks have to agree on."""
    ways = ((_of(each, config), each.param_groups) for each in members(optimizer))
    return [way for way, groups in ways for _ in groups]


def of_unknown(known: dict[nn.Parameter, Stepping], config: Config) -> Stepping:
    """How parameters that no optimizer knows are treated: like others, so that they need no buffers of their
    own. Where there is no optimizer yet, as by the kernel that most have."""
    others = (stepping for stepping in known.values() if not stepping.whole)
    return next(others, Stepping() if known else Stepping(RULES[0].keeping(config.moments)))


def ways_of(parameters: Iterable[nn.Parameter], known: Mapping[nn.Parameter, Stepping]) -> set[Stepping]:
    """How these parameters are stepped, those that an optimizer knows."""
    return {known[parameter] for parameter in parameters if parameter in known}


def _of(optimizer: Optimizer, config: Config) -> Stepping:
    rule = rule_for(optimizer)
    if rule is not None:
        return Stepping(rule.keeping(config.moments))
    if config.stage == 0 or config.whole_parameters is False:
        return Stepping()
    return Stepping(whole=bool(config.whole_parameters) or not goes_by_element(optimizer))


def goes_by_element(optimizer: Optimizer) -> bool:
    """Whether it is known that stepping a slice gives a slice of the whole step."""
    bases = {base.__name__ for base in type(optimizer).__mro__}
    return is_known(optimizer) and not LOOKS_AT_MATRICES & bases


def is_known(optimizer: Optimizer) -> bool:
    """Whether the optimizer is known to step every parameter by itself."""
    kind = type(optimizer)
    return kind in SERVED or f"{kind.__module__}.".startswith("torch.optim.")
