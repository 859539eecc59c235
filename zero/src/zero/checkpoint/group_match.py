"""Which of a checkpoint's param_groups gives each of the optimizer's its options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def match_groups(
    own: Mapping[str, int], saved: Mapping[str, int], groups: int
) -> tuple[dict[int, int], list[str]]:
    """For each of `groups` param_groups that of the checkpoint which most of its parameters were in, one to
    one as far as that goes, by place where none were in any; and names of parameters that have left theirs.

    own, saved: the group of each parameter, now and in the checkpoint, by the names of today.
    """
    votes = Counter((own[name], group) for name, group in saved.items())
    ranked = sorted(votes, key=lambda pair: (-votes[pair], pair[0] != pair[1], pair))
    chosen: dict[int, int] = {}
    for group, old in ranked:
        if group not in chosen and old not in chosen.values():
            chosen[group] = old
    left = [name for name, old in saved.items() if chosen.get(own[name]) != old]
    for group, old in ranked:
        chosen.setdefault(group, old)  # one that another has as well, for want of one of its own
    free = [old for old in range(groups) if old not in chosen.values()]
    for group in (group for group in range(groups) if group not in chosen):
        chosen[group] = group if group in free else free[0]
        free.remove(chosen[group])
    return chosen, left
