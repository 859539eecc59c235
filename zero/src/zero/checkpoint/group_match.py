"""Which of a checkpoint's param_groups gives each of the optimizer's its options."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping


def match_groups(
    own: Mapping[str, int], saved: Mapping[str, int], groups: int
) -> tuple[dict[int, int], list[str]]:
    """For each of `groups` param_groups that of the checkpoint which most of its parameters were in, by place
    where none of them were in any; and the names of parameters that have left their group.

    own, saved: the group of each parameter, now and in the checkpoint, by the names of today.
    """
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    for name, group in saved.items():
        votes[own[name]][group] += 1
    chosen = {
        group: max(counter, key=lambda old: (counter[old], old == group))
        for group, counter in sorted(votes.items())
    }
    first = {old: group for group, old in reversed(chosen.items())}
    left = [name for name, old in saved.items() if first.get(old) != own[name]]
    free = [old for old in range(groups) if old not in first]
    for group in (group for group in range(groups) if group not in chosen):
        chosen[group] = group if group in free else free[0]
        free.remove(chosen[group])
    return chosen, left
