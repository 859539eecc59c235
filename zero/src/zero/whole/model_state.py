"""Read the model's whole state dict from the shards, and load it into them. Collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any, cast

import torch
from torch import Tensor, nn

from accelz import HOST
from zero.communication.mesh import Mesh, Meshes
from zero.errors import StateError, some
from zero.sharding.distributed import as_distributed, block_of, is_distributed
from zero.sharding.flat_group import FlatGroup
from zero.sharding.forms import packed_leaves
from zero.sharding.sharded_unit import ShardedUnit
from zero.sharding.state_entries import EVERYTHING, Selection, entries_of, load_rest, state_of
from zero.whole.full_parameters import FullParameters, spread_buffer, view_of


def read(
    model: nn.Module, full_parameters: FullParameters, master: bool, selection: Selection = EVERYTHING
) -> dict[str, Any]:
    """Return what `model.state_dict()` would be unsharded, in rank 0's host memory ({} on other ranks).

    master: return fp32 masters where there are any. selection: the entries to return. One group at a time is
    whole on the device, and only those that have any of these entries.
    """
    values: dict[nn.Parameter, Tensor] = {}
    entries, pairs = entries_of(model), [(u, g) for u in full_parameters.units for g in u.groups]
    owner = entries.by_name
    chosen = selection.chosen(entries, {p for _, g in pairs if g.trainable for p in g.parameters})
    wanted = {owner[name] for name in chosen if name in owner}
    with full_parameters.communicator.together():
        for unit, group in ((u, g) for u, g in pairs if not wanted.isdisjoint(g.parameters)):
            shard = group.master if master and group.master is not None else group.shard
            full = full_parameters.gather(unit, group, shard)
            if full_parameters.is_source:
                for index, parameter in enumerate(group.parameters):
                    if parameter in wanted:
                        mine = view_of(full, group, index).to(HOST, copy=True).contiguous()
                        values[parameter] = as_distributed(parameter, mine)
    if not full_parameters.is_source:
        return {}
    return {
        name: values[owner[name]] if name in owner else _copied(value)
        for name, value in state_of(model).items()
        if name in chosen
    }


def load(
    model: nn.Module,
    full_parameters: FullParameters,
    state: Mapping[str, Any] | None,
    strict: bool,
    before_change: Callable[[], None],
) -> None:
    """Distribute rank 0's state dict (ignored on other ranks).

    before_change: called after everything has been checked and before the first value changes.

    Raises StateError on every rank, before anything changes, for shapes that differ and, if strict, for
    names that are missing or unknown.
    """
    communicator, meshes = full_parameters.communicator, full_parameters.meshes
    rank = communicator.grid.name(communicator.whole.rank)
    problem = _no_state(state, rank) if full_parameters.is_source else ""
    state = dict(state) if full_parameters.is_source and state is not None and not problem else {}
    entries = entries_of(model)
    blocks = {name: p for name, p in entries.by_name.items() if is_distributed(p)}
    groups = [group for unit in full_parameters.units for group in unit.groups]
    own = {p: name for group in groups for name, p in zip(group.names, group.parameters, strict=True)}
    rest = {name: state[name] for name in entries.rest if name in state}
    packed: dict[frozenset[str], bytes] = {}  # by where they differ
    if full_parameters.is_source:
        problem = problem or _misfits(model, state, strict, blocks) or _pack(rest, meshes, packed)
    gather = communicator.all_gather_alike
    if problem := next(filter(None, gather(problem)), ""):
        raise StateError(f"the state dict does not fit the model: {problem}")
    given = {own[p]: state[name] for name, p in entries.by_name.items() if name in state and p in own}
    told = [sorted(given), sorted(map(sorted, packed))]
    every = [each for each in gather(told if full_parameters.is_source else None) if each is not None]
    present = set.intersection(*(set(names) for names, _ in every))
    rest = {}
    for dims in sorted({tuple(kind) for _, kinds in every for kind in kinds}):
        rest |= _shared(full_parameters, packed.get(frozenset(dims), b""), meshes.of(dims))
    given |= {own[p]: block_of(p, state[name]) for name, p in blocks.items() if own.get(p) in given}
    before_change()
    with full_parameters.communicator.together():
        for unit in full_parameters.units:
            for group in unit.groups:
                _load_group(full_parameters, unit, group, given, present)
        _load_buffers(full_parameters, entries.buffers, state)
        load_rest(model, rest)


def _no_state(state: object, rank: str) -> str:
    if isinstance(state, Mapping):
        return ""
    return (
        f"rank {rank} passed {type(state).__name__} instead of a mapping of names to tensors; load files "
        "with torch.load"
    )


def _pack(rest: Mapping[str, Any], meshes: Meshes, into: dict[frozenset[str], bytes]) -> str:
    """Pickle entries, which may be any objects, by the dimensions along which they differ; return what is
    wrong with them, "" for nothing."""
    kinds = {name: meshes.of_extra_state(name) for name in rest}
    for kind in set(kinds.values()):
        packed, entries = BytesIO(), {name: value for name, value in rest.items() if kinds[name] == kind}
        try:
            torch.save(entries, packed)
        except Exception as error:
            return f"{some(list(entries))} cannot be sent to other ranks: {error}"
        into[kind] = packed.getvalue()
    return ""


def _shared(full_parameters: FullParameters, packed: bytes, mesh: Mesh) -> dict[str, Any]:
    """Return, on every rank of a mesh, what its first has packed; nothing where that is b""."""
    communicator, device = full_parameters.communicator, full_parameters.device
    size = torch.tensor([len(packed)], device=device)
    spread_buffer(communicator, "extra state", size, mesh)
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if mesh.is_first and packed:
        data.copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
    spread_buffer(communicator, "extra state", data, mesh)
    if not data.numel():
        return {}
    found = torch.load(BytesIO(data.to(HOST).numpy().tobytes()), map_location=HOST, weights_only=False)
    return dict(found)


def _copied(value: Any) -> Any:
    return value.detach().to(HOST, copy=True) if isinstance(value, Tensor) else value


def _misfits(
    model: nn.Module, state: Mapping[str, Any], strict: bool, blocks: Mapping[str, nn.Parameter]
) -> str:
    expected, packed = state_of(model), packed_leaves(model)
    given = [(n, state[n], e) for n, e in expected.items() if isinstance(e, Tensor) and n in state]
    pairs = [(n, v, e) for n, v, e in given if isinstance(v, Tensor)]
    shapes = [f"{n}: {tuple(v.shape)} instead of {tuple(e.shape)}" for n, v, e in pairs if v.shape != e.shape]
    alike = [(n, v.dtype, e.dtype) for n, v, e in pairs if e in packed]
    problems = {
        "with a different shape": shapes,
        "packed in another dtype": [f"{n}: {has} instead of {is_}" for n, has, is_ in alike if has != is_],
        "not a dense tensor with all its values": [n for n, v, _ in given if not _fits(v, blocks.get(n))],
    }
    if strict:
        problems["missing"] = [n for n in expected if n not in state]
        problems["unexpected"] = [n for n in state if n not in expected]
    return "; ".join(f"{what}: {some(names)}" for what, names in problems.items() if names)


def _fits(value: Any, of: nn.Parameter | None) -> bool:
    """Whether a value is a dense tensor with all its values: not on the meta device, and no DTensor.

    of: the DTensor whose values they are to be, which may be given as one that is laid out alike.
    """
    if of is not None and is_distributed(value):
        return bool(value.placements == cast(Any, of).placements)
    dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
    return dense and not hasattr(value, "full_tensor")


def _load_group(
    full_parameters: FullParameters,
    unit: ShardedUnit,
    group: FlatGroup,
    given: Mapping[str, Tensor],
    present: set[str],
) -> None:
    wanted = [(index, name) for index, name in enumerate(group.names) if name in present]
    if not wanted:
        return
    dtype = group.dtype if group.master is None else group.master.dtype
    full = full_parameters.spread(unit, group, dtype, {index: given.get(name) for index, name in wanted})
    for index, _ in wanted:
        if unit.resident:
            view_of(group.home.data, group, index).copy_(view_of(full, group, index))
        full_parameters.assign(group, index, full)


def _load_buffers(
    full_parameters: FullParameters, buffers: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    with torch.no_grad():
        for name, buffer in buffers.items():
            if isinstance(state.get(name), Tensor):
                buffer.copy_(state[name])
            spread_buffer(full_parameters.communicator, name, buffer, full_parameters.meshes.of_buffer(name))
