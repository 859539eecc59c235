"""The model's whole state dict, out of the shards and back into them. Collective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accelz.flat_buffer import HOST
from zero.errors import some
from zero.sharding.flat_group import FlatGroup
from zero.sharding.sharded_unit import ShardedUnit
from zero.sharding.whole import WholeValues, view_of


def read(model: nn.Module, whole: WholeValues, master: bool) -> dict[str, Any]:
    """What `model.state_dict()` would be unsharded, in rank 0's host memory ({} on other ranks).

    master: fp32 masters where there are some. One group at a time is whole on the device.
    """
    values: dict[str, Tensor] = {}
    with whole.together():
        for unit, group in ((u, g) for u in whole.units for g in u.groups):
            shard = group.master if master and group.master is not None else group.shard
            full = whole.gather(unit, group, shard)
            if whole.is_source:
                for index, name in enumerate(group.names):
                    values[name] = view_of(full, group, index).to(HOST, copy=True).contiguous()
    if not whole.is_source:
        return {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {key: _plain(value, names, values) for key, value in model.state_dict(keep_vars=True).items()}


def load(model: nn.Module, whole: WholeValues, state: Mapping[str, Any] | None, strict: bool) -> None:
    """Distribute rank 0's state dict (ignored on other ranks).

    Raises StateError on every rank, before anything changes, for shapes that differ and, if strict, for
    names that are missing or unknown.
    """
    state = dict(state or {}) if whole.is_source else {}
    problem = _misfits(model, state, strict) if whole.is_source else ""
    whole.raise_together(problem and f"the state dict does not fit the model: {problem}")
    first = {parameter: name for name, parameter in model.named_parameters()}
    known = {n: first[p] for n, p in model.named_parameters(remove_duplicate=False)}
    given = {known[n]: value for n, value in state.items() if n in known}
    present = set(whole.share(sorted(given)))
    with whole.changing():
        for unit in whole.units:
            for group in unit.groups:
                _load_group(whole, unit, group, given, present)
        _load_buffers(model, whole, state)


def _plain(value: Any, names: Mapping[nn.Parameter, str], values: Mapping[str, Tensor]) -> Any:
    if isinstance(value, nn.Parameter):
        return values[names[value]]
    return value.detach().to(HOST, copy=True) if isinstance(value, Tensor) else value


def _misfits(model: nn.Module, state: Mapping[str, Any], strict: bool) -> str:
    expected = model.state_dict(keep_vars=True)
    shapes = [
        f"{n}: {tuple(state[n].shape)} instead of {tuple(e.shape)}"
        for n, e in expected.items()
        if isinstance(e, Tensor) and isinstance(state.get(n), Tensor) and state[n].shape != e.shape
    ]
    problems = {"of another shape": shapes}
    if strict:
        problems["missing"] = [n for n in expected if n not in state]
        problems["unexpected"] = [n for n in state if n not in expected]
    return "; ".join(f"{what}: {some(names)}" for what, names in problems.items() if names)


def _load_group(
    whole: WholeValues, unit: ShardedUnit, group: FlatGroup, given: Mapping[str, Tensor], present: set[str]
) -> None:
    wanted = [(index, name) for index, name in enumerate(group.names) if name in present]
    if not wanted:
        return
    dtype = group.dtype if group.master is None else group.master.dtype
    full = whole.spread(unit, group, dtype, {index: given.get(name) for index, name in wanted})
    for index, _ in wanted:
        if unit.resident:
            view_of(group.home.data, group, index).copy_(view_of(full, group, index))
        whole.assign(group, index, full)


def _load_buffers(model: nn.Module, whole: WholeValues, state: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for name, buffer in model.state_dict(keep_vars=True).items():
            if isinstance(buffer, Tensor) and not isinstance(buffer, nn.Parameter):
                if isinstance(state.get(name), Tensor):
                    buffer.copy_(state[name])
                whole.spread_buffer(name, buffer)
