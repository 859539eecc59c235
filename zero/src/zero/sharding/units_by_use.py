"""Units for graphs: parameters that are used alike and together.

A graph gathers each unit where it is used, whatever module holds it. So the root's large matrices (embedding,
head) need not stay whole all the time: each is a unit of its own. Vectors (norms, biases) are used as they
are where autocast casts matrices. One unit for all of them is a small gather, and the other units travel
narrow.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zero.sharding.units import PERSISTENT, ROOT, UnitPlan

VECTORS = "<vectors>"
ALONE = 1 << 14
"""Elements from which a matrix of the root is a unit of its own."""

Named = tuple[str, nn.Parameter]


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


def _is_vector(item: Named) -> bool:
    return item[1].dim() < 2
