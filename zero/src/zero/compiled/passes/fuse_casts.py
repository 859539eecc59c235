"""Where a unit is only ever used cast to one narrower dtype, gathers it in that dtype.

Each rank casts its shard before it travels: half the bytes for bf16, no whole fp32 copy, and no cast left in
the graph. The values are the same, because a cast works on each element alone. Where uses want several
dtypes, the unit is gathered in the widest that one of them needs, and the others cast from it.

Needs: gathers and releases (`insert_gathers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import fx

from zero.compiled.graphs import ShardedGraph, cast_of, dtype_of, is_alias, readers
from zero.compiled.ops import RELEASE


def fuse_casts(graph: ShardedGraph) -> int:
    """Returns how many casts are gone."""
    begins, waits = graph.begins(), graph.waits()
    gone = sum(_fuse(begins[graph.unit_of(wait)], wait) for wait in waits)
    order = graph.positions()
    for wait in waits:
        _release_late(wait, order)
    return gone


def _release_late(wait: fx.Node, order: dict[fx.Node, int]) -> None:
    """Move the release after the last reader: nodes that read a cast now read what is released."""
    found = [reader for value in wait.users for reader in readers(value)]
    (release,) = {reader for reader in found if reader.target is RELEASE}
    last = max((reader for reader in found if reader is not release), key=order.__getitem__)
    if order[last] > order[release]:
        last.append(release)


def _fuse(begin: fx.Node, wait: fx.Node) -> int:
    values = [v for v in wait.users if dtype_of(v) is torch.float32]
    wanted = {dtype for value in values for dtype in _wanted(value)}
    narrow = [dtype for dtype in wanted if dtype is not None]
    if not wanted or None in wanted:
        return 0
    cast = reduce(torch.promote_types, narrow)
    if cast.itemsize >= torch.float32.itemsize:
        return 0
    for node in (begin, wait):
        node.args = (*node.args[:3], cast)
    wait.meta["val"] = [_as(v, cast) for v in wait.meta["val"]]
    return sum(_retype(value, cast) for value in values)


def _wanted(value: fx.Node) -> Iterator[torch.dtype | None]:
    """The dtypes that readers cast `value` to; None for a reader that takes it as it is."""
    for user in value.users:
        if user.target is RELEASE:
            continue
        if cast_of(user) is not None:
            yield cast_of(user)
        elif user.op != "output" and is_alias(user, value):
            yield from _wanted(user)
        else:
            yield None


def _retype(value: fx.Node, cast: torch.dtype) -> int:
    """Give `value` and its views the dtype `cast`; drop the casts to it."""
    value.meta["val"] = _as(value.meta["val"], cast)
    gone = 0
    for user in tuple(value.users):
        if cast_of(user) is cast:
            user.replace_all_uses_with(value)
            user.graph.erase_node(user)
            gone += 1
        elif user.target is not RELEASE and cast_of(user) is None:
            gone += _retype(user, cast)
    return gone


def _as(value: object, cast: torch.dtype) -> object:
    if isinstance(value, torch.Tensor):
        return value.to(cast) if value.dtype is torch.float32 else value
    if isinstance(value, Sequence):
        return type(value)(_as(v, cast) for v in value)  # type: ignore[call-arg]
    return value
