"""Tensors over a parameter's memory that are not the parameter: plain training keeps them up to date.

An engine gives parameters memory of their own, so a view that a module keeps of its weight would go on with
the values of before. That there is such a tensor is told by the use count of the memory, which is exact, so
that the usual model costs microseconds. Only then is it looked for, in all that the model reaches. Whole
values outside of it, as state dicts and variables hold them, are warned of; what else has the memory is
refused. What is not counted is an array that a parameter was made from, as that is what the memory belongs
to; so memory that is not torch's own is always looked for.

Left alone is what training does not make wrong: aliases of frozen parameters, graphs of earlier forwards,
what a hook sets anew before each forward (`torch.nn.utils.spectral_norm`).

What the program has hidden by `gc.freeze()` is counted, and cannot be looked at: what would be warned of is
refused, and a view that a variable holds is taken for one of a graph.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from accelz import HOST
from zero.deferred import deferred_init
from zero.drafts.reached import reached
from zero.drafts.spans import Spans, span_of
from zero.errors import ModelError, some
from zero.sharding.distributed import local_of
from zero.tiers.apart import apart
from zero.warning import warn

_use_count = getattr(torch._C, "_storage_Use_Count", None)  # private; without it, models alone are searched


@dataclass
class _Memory:
    """A storage in which parameters lie.

    users: uses of it by anything but the model's parameters. foreign: torch did not allocate it.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    users: int = 0
    foreign: bool = False

    @property
    def trained(self) -> bool:
        return any(p.requires_grad for p in self.parameters.values())

    def is_cut_by(self, tensor: Tensor, spans: Spans) -> bool:
        """Return whether a tensor has a part of a parameter, or its values in another form."""
        name = spans.over(span_of(tensor))
        return name in self.parameters and not _is_whole(tensor, self.parameters[name])

    def users_but(self, tensors: Sequence[Tensor], views: Sequence[Tensor]) -> int:
        """Return how many users are neither among these tensors nor views that only autograd's graphs have.

        views: those of parameters that the program has.
        """
        in_graphs = sum(p._use_count() - 1 for p in self.parameters.values())  # type: ignore[attr-defined]
        in_graphs -= sum(any(t._base is p for p in self.parameters.values()) for t in views)
        return self.users - len(tensors) - max(in_graphs, 0)


def check_aliases(model: nn.Module) -> None:
    """Raise ModelError if anything but the model's parameters has the memory of one that is trained.

    Warns of whole values outside the model. Changes nothing.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if not _shared_memories(model):
            return
        gc.collect()  # what is in a cycle of garbage is in nobody's use
        memories = _shared_memories(model)
        if not memories:
            return
        ids = {id(parameter) for parameter in model.parameters()}
        named = (item for memory in memories.values() for item in memory.parameters.items())
        spans = Spans((span, n) for n, p in named if p.requires_grad and (span := span_of(p)) is not None)
        kept, tensors = _kept(model, memories, ids, spans)
        left, others = _used_outside(memories, ids, spans, tensors)
    kept |= dict.fromkeys(others - kept.keys(), "something outside the model")
    if kept:
        shown = some([f"{where} (of {name!r})" for name, where in kept.items()])
        hidden = f". {_HIDDEN}" if others and gc.get_freeze_count() else ""
        raise ModelError(f"there are tensors over the memory of parameters: {shown}. {_STALE}{hidden}")
    if left:
        warn(_LEFT.format(some(left)))


def _shared_memories(model: nn.Module) -> dict[int, _Memory]:
    """Return the storages of trained parameters that something else uses, or may use, by their address."""
    memories: dict[int, _Memory] = {}
    for name, parameter in model.named_parameters():
        if deferred_init.is_deferred(parameter) or parameter.is_meta or parameter.numel() == 0:
            continue
        if local_of(parameter) is not parameter:  # it has no memory itself, and the tensor inside is its own
            continue
        memory = memories.setdefault(_storage_of(parameter), _Memory())
        memory.users = _uses(parameter) - _uses_of_one() - len(memory.parameters)
        memory.foreign = _use_count is None or not parameter.untyped_storage().resizable()
        memory.parameters[name] = parameter
    return {key: m for key, m in memories.items() if (m.users or m.foreign) and m.trained}


def _uses(tensor: Tensor) -> int:
    """Count the uses of a tensor's storage: by tensors, and by Python for itself."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage) + (0 if _use_count is None else int(_use_count(storage._cdata)))


@cache
def _uses_of_one() -> int:
    with apart():
        return _uses(torch.empty(1, device=HOST))


def _kept(
    model: nn.Module, memories: Mapping[int, _Memory], ids: Collection[int], spans: Spans
) -> tuple[dict[str, str], list[Tensor]]:
    """Look in the model. Returns where it keeps what has the memory of a trained parameter, by the name of
    that, and the tensors that it keeps in these memories. ids: of its parameters."""
    anew = {id(tensor) for tensor in _set_anew(model)}
    kept: dict[str, str] = {}
    tensors: dict[int, Tensor] = {}
    for path, item in reached(model):
        if id(item) in ids:
            continue
        if issubclass(type(item), Tensor) and _storage_of(item) in memories:
            bases = [] if item._base is None or id(item._base) in ids else [item._base]
            tensors |= {id(tensor): tensor for tensor in (item, *bases)}
        name = spans.over(span_of(item))
        if name is not None and id(item) not in anew:
            kept.setdefault(name, path)
    return kept, [*tensors.values()]


def _used_outside(
    memories: Mapping[int, _Memory], ids: Collection[int], spans: Spans, kept: Sequence[Tensor]
) -> tuple[list[str], set[str]]:
    """Return the name of one parameter of each memory that has users besides these tensors: where these are
    whole values, as state dicts and variables hold them, and where there are others."""
    every = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    known = {*ids, *map(id, kept)}
    views = [t for t in every if t._base is not None and (t._use_count() == 1 or id(t) in known)]
    left, others = list[str](), set[str]()
    for key, memory in memories.items():
        users = memory.users_but([t for t in kept if _storage_of(t) == key], views)
        strays = [t for t in every if id(t) not in known and _storage_of(t) == key]
        strays = [t for t in strays if id(t._base) not in ids or t._use_count() == 1]  # those of graphs go
        bases = {id(t._base) for t in strays if t._base is not None} - known - set(map(id, strays))
        name = next(name for name, p in memory.parameters.items() if p.requires_grad)
        if users <= 0:  # graphs also count parameters themselves; what Python alone holds is in none
            strays = [t for t in strays if t._use_count() == 1]
            if not strays:
                continue
        if users > len(strays) + len(bases) or any(memory.is_cut_by(t, spans) for t in strays):
            others.add(name)
        else:
            left.append(name)
    return left, others


def _set_anew(model: nn.Module) -> Iterator[Tensor]:
    """Yield attributes that hooks of torch.nn.utils compute before each forward of their modules."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            name = getattr(hook, "name", getattr(hook, "_tensor_name", None))
            value = vars(module).get(name) if isinstance(name, str) else None
            if isinstance(value, Tensor):
                yield value


def _is_whole(tensor: Tensor, parameter: nn.Parameter) -> bool:
    """Return whether a tensor has just a parameter's values, in their order: also flat, or as bytes, as
    tensors of safetensors are views of what was read."""
    if (tensor.data_ptr(), tensor.nbytes) != (parameter.data_ptr(), parameter.nbytes):
        return False
    orders = [(t.is_contiguous(), () if t.is_contiguous() else t.stride()) for t in (tensor, parameter)]
    return orders[0] == orders[1]


def _storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage object; 0 if it has none, as in torch.func."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:
        return 0


_STALE = (
    "Training would leave them behind with the values of now, because zero gives parameters memory of their "
    "own. Take the view in forward, from the parameter; register one Parameter in every module that uses it; "
    "or keep values that are to stay as they are with .clone(). del what nothing needs: notebooks keep what "
    "was shown, and the variables of the last error"
)
_HIDDEN = (
    "gc.freeze() hides whether that is harmless, as a state dict is, or garbage: call gc.unfreeze() "
    "before zero.initialize, and gc.freeze() after it"
)
_LEFT = (
    "something outside the model shares the memory of {}, such as a state dict or a variable of before "
    "zero.initialize. It keeps the values of now, where plain training would change them, and the memory: "
    "del what is not needed, and call engine.state_dict() for the values of later"
)
