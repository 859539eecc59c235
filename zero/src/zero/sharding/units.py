"""Divide the module tree into units: the modules whose parameters are gathered together.

By default the topmost repeated blocks are units (children of one class inside a ModuleList, Sequential or
ModuleDict). The remaining parameters belong to the root unit, which stays gathered while the model's forward
runs. A parameter used in several units belongs to the innermost unit that contains all its users.

A graph gathers each unit where it is used, whatever module holds it. So for graphs the root's large matrices
(embedding, head) need not stay whole all the time: each is a unit of its own. Vectors (norms, biases) are
used as they are where autocast casts matrices. One unit for all of them is a small gather, and the other
units travel narrow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import nn

from zero.config.training import UnitRule
from zero.errors import ConfigError
from zero.sharding.forms import inner_leaves
from zero.sharding.state_entries import first_names

ROOT = "<root>"
PERSISTENT = "<persistent>"
VECTORS = "<vectors>"
ALONE = 1 << 14
"""Elements from which a matrix of the root is a unit of its own in graphs."""
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_LEAF_MINIMUM = 1 << 14  # elements; a smaller repeated leaf (a bare Linear) is not worth a collective


@dataclass(frozen=True)
class UnitPlan:
    """A unit before it is built.

    hooked_modules: modules whose forward needs the parameters: the unit's module and, for the root unit, also
    the modules that hold its parameters, so that calling one of them by itself works. parameters: by their
    leaves (see `forms`). wrappers: parameters that are none of their own
    leaves, with their names.
    """

    name: str
    hooked_modules: tuple[nn.Module, ...]
    parameters: tuple[tuple[str, nn.Parameter], ...]
    persistent: bool = False
    wrappers: tuple[tuple[str, nn.Parameter], ...] = ()


def find_units(model: nn.Module, rule: UnitRule, persistent_below: int = 0) -> list[UnitPlan]:
    """Assign every parameter of `model` to exactly one unit, in module order, the root unit last.

    Raises ConfigError if `rule` picks no module. Units without parameters are left out.
    """
    chosen = dict(_chosen(model, rule))
    if rule != "auto" and not chosen:
        what = "only the model itself, whose remainder is a unit anyway: name parts of it"
        if not _matches(rule, "", model):
            what = "no module with parameters; check the class or the function"
        raise ConfigError(f"units={rule!r} matches {what}")
    owner = _assign(model, chosen)
    plans: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in (*chosen, ROOT, PERSISTENT)}
    inner = inner_leaves(model)
    outer = {id(leaf): (s, parameter) for parameter, leaves in inner.items() for s, leaf in leaves.items()}
    for leaf, name in first_names(model).items():
        _, parameter = outer.get(id(leaf), ("", leaf))
        # A scale for all values is read on the host in places: as is torchao's and bitsandbytes' way.
        single = parameter is not leaf and leaf.numel() == 1
        small = single or parameter.numel() < persistent_below
        plans[PERSISTENT if small else owner[parameter]].append((name, leaf))
    return [_unit_plan(model, name, chosen, found, outer) for name, found in plans.items() if found]


def _unit_plan(
    model: nn.Module,
    name: str,
    chosen: dict[str, nn.Module],
    found: list[tuple[str, nn.Parameter]],
    outer: Mapping[int, tuple[str, nn.Parameter]],
) -> UnitPlan:
    """outer: for each leaf inside a parameter, by its id, its own part of its name, and the parameter."""
    mine: dict[nn.Parameter, str] = {}
    for leaf_name, leaf in found:
        suffix, parameter = outer.get(id(leaf), ("", leaf))
        mine.setdefault(parameter, leaf_name.removesuffix(f".{suffix}"))
    hooked, persistent = _hooked_modules(model, name, chosen, mine), name == PERSISTENT
    here = {leaf for _, leaf in found}
    inside = mine.keys() - here
    if persistent:  # a wrapper with leaves elsewhere, too, belongs there
        elsewhere = {id(p) for key, (_, p) in outer.items() if key not in set(map(id, here))}
        inside = {parameter for parameter in inside if id(parameter) not in elsewhere}
    wrappers = tuple((called, parameter) for parameter, called in mine.items() if parameter in inside)
    return UnitPlan(name, hooked, tuple(found), persistent, wrappers)


def _chosen(model: nn.Module, rule: UnitRule) -> Iterator[tuple[str, nn.Module]]:
    if rule == "auto":
        yield from _repeated_blocks("", model)
        return
    for name, module in model.named_modules():
        if module is not model and _numel(module) and _matches(rule, name, module):
            yield name, module


def _matches(rule: UnitRule, name: str, module: nn.Module) -> bool:
    if callable(rule):
        return bool(rule(name, module))
    return any(
        type(module).__name__ == kind if isinstance(kind, str) else isinstance(module, kind) for kind in rule
    )


def _repeated_blocks(prefix: str, parent: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    children = list(parent.named_children())
    classes = Counter(type(c) for _, c in children if _is_block(c))
    for name, child in children:
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(parent, _CONTAINERS) and _is_block(child) and classes[type(child)] > 1:
            yield path, child
        else:
            yield from _repeated_blocks(path, child)


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, _CONTAINERS[::2]):  # a list or dict has no forward to hook
        return False
    leaf = next(module.children(), None) is None
    return _numel(module) >= (_LEAF_MINIMUM if leaf else 1)


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _assign(model: nn.Module, chosen: dict[str, nn.Module]) -> dict[nn.Parameter, str]:
    """Map each parameter to the innermost unit that contains every module holding it."""
    chains: dict[nn.Parameter, list[str]] = {}
    _visit(model, [], {module: name for name, module in chosen.items()}, chains)
    return {parameter: chain[-1] if chain else ROOT for parameter, chain in chains.items()}


def _visit(
    module: nn.Module, chain: list[str], unit_of: dict[nn.Module, str], chains: dict[nn.Parameter, list[str]]
) -> None:
    """Note for each parameter inside the units that contain every module holding it, outermost first.

    chain: the units around `module`.
    """
    if module in unit_of:
        chain = [*chain, unit_of[module]]
    for parameter in module._parameters.values():
        if parameter is not None:
            known = chains.get(parameter)
            chains[parameter] = chain if known is None else _common(known, chain)
    for child in module.children():
        _visit(child, chain, unit_of, chains)


def _common(first: list[str], second: list[str]) -> list[str]:
    pairs = zip(first, second, strict=False)
    return [name for name, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _hooked_modules(
    model: nn.Module, name: str, chosen: dict[str, nn.Module], mine: Collection[nn.Parameter]
) -> tuple[nn.Module, ...]:
    if name == PERSISTENT:
        return ()
    if name != ROOT:
        return (chosen[name],)
    holders = (m for m in model.modules() if any(p in mine for p in m._parameters.values() if p is not None))
    return (model, *(m for m in holders if m is not model))


def split_by_use(plans: Sequence[UnitPlan]) -> list[UnitPlan]:
    """The same parameters in finer units, in the order of `plans`. Persistent ones stay as they are."""
    kept = [plan for plan in plans if plan.name == PERSISTENT]
    split = [part for plan in plans if plan.name != PERSISTENT for part in _matrices(plan)]
    return [*split, *_vectors([p for p in plans if p.name != PERSISTENT]), *kept]


def _matrices(plan: UnitPlan) -> list[UnitPlan]:
    named = [item for item in plan.parameters if not _is_vector(item)]
    alone = [item for item in named if plan.name == ROOT and item[1].numel() >= ALONE]
    large = {name for name, _ in alone}
    rest = tuple(item for item in named if item[0] not in large)
    parts = [UnitPlan(name, plan.hooked_modules, ((name, parameter),)) for name, parameter in alone]
    return [*parts, UnitPlan(plan.name, plan.hooked_modules, rest)] if rest else parts


def _vectors(plans: Sequence[UnitPlan]) -> list[UnitPlan]:
    holders = [plan for plan in plans if any(_is_vector(item) for item in plan.parameters)]
    if not holders:
        return []
    hooked_modules = dict.fromkeys(hooked for plan in holders for hooked in plan.hooked_modules)
    named = [item for plan in holders for item in plan.parameters if _is_vector(item)]
    return [UnitPlan(VECTORS, tuple(hooked_modules), tuple(named))]


def _is_vector(item: tuple[str, nn.Parameter]) -> bool:
    return item[1].dim() < 2
