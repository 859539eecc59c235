"""Matching the optimizer's param_groups to those of a checkpoint, from which they take their options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def match_groups(
    now: Mapping[str, int], saved: Mapping[str, int], groups: int
) -> tuple[dict[int, int], list[str]]:
    """Match each of `groups` param_groups to the checkpoint's group that most of its parameters were in.

    The matching is one to one as far as possible; a group none of whose parameters were in any is matched by
    its place. Returns the index in the checkpoint for each group's own, and the names of the parameters that
    were in another group than their group's match.

    now, saved: each parameter's group, now and in the checkpoint, both by its present name.
    """
    votes = Counter((now[name], group) for name, group in saved.items())
    ranked = sorted(votes, key=lambda pair: (-votes[pair], pair[0] != pair[1], pair))
    chosen: dict[int, int] = {}
    for group, old in ranked:
        if group not in chosen and old not in chosen.values():
            chosen[group] = old
    left = [name for name, old in saved.items() if chosen.get(now[name]) != old]
    for group, old in ranked:
        chosen.setdefault(group, old)  # taken by another group as well, as none is left for this one
    free = [old for old in range(groups) if old not in chosen.values()]
    for group in (group for group in range(groups) if group not in chosen):
        chosen[group] = group if group in free else free[0]
        free.remove(chosen[group])
    return chosen, left
