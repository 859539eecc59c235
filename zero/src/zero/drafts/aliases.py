"""Tensors over a parameter's memory that are not the parameter: plain training keeps them up to date.

An engine gives parameters memory of their own, so a view that a module keeps of its weight would go on with
the values of before. That there is such a tensor is told by the use count of the memory, which is exact, so
that the usual model costs microseconds. Only then is it looked for: in all that the model reaches, and among
all tensors of the process. What is not counted is an array that a parameter was made from, as that is what
the memory belongs to; so memory that is not torch's own is always looked for in the model.

Left alone is what training does not make wrong: aliases of frozen parameters, graphs of earlier forwards,
what a hook sets anew before each forward (`torch.nn.utils.spectral_norm`). State dicts, and variables that a
program has left over, are warned of.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from accelz import HOST
from zero.deferred import deferred_init
from zero.drafts.holders import Holders
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

    def users_without_name(self, tensors: Sequence[Tensor]) -> int:
        """Return how many users are neither among these tensors nor views in autograd's graphs."""
        parameters = self.parameters.values()
        in_graphs = sum(p._use_count() - 1 for p in parameters)  # type: ignore[attr-defined]
        in_graphs -= sum(any(t._base is p for p in parameters) for t in tensors)
        return self.users - len(tensors) - max(in_graphs, 0)


def check_aliases(model: nn.Module) -> None:
    """Raise ModelError if anything but the model's parameters has the memory of one that is trained.

    Warns of state dicts and left-over variables. Changes nothing.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if not _shared_memories(model):
            return
        gc.collect()  # what is in a cycle of garbage is in nobody's use
        memories = _shared_memories(model)
        if not memories:
            return
        search = _Search(model, memories)
    if search.kept:
        shown = some([f"{where} (of {name!r})" for name, where in search.kept.items()])
        raise ModelError(f"there are tensors over the memory of parameters: {shown}. {_STALE}")
    if search.left:
        warn(f"{_LEFT} {some(search.left)}")


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


class _Search:
    """For what uses these memories, in a model and outside it.

    kept: parameters of which there is an alias, and where it is kept. left: those of which only state dicts
    and left-over variables hold one.
    """

    def __init__(self, model: nn.Module, memories: Mapping[int, _Memory]) -> None:
        self.kept: dict[str, str] = {}
        self.left: list[str] = []
        self._memories = memories
        self._ids = {id(parameter) for parameter in model.parameters()}
        named = [item for memory in memories.values() for item in memory.parameters.items()]
        self._parameters = dict(named)
        trained = ((span_of(p), name) for name, p in named if p.requires_grad)
        self._spans = Spans((span, name) for span, name in trained if span is not None)
        self._reached: dict[int, Tensor] = {}
        self._look_in(model)
        tensors = self._tensors()
        self._look_outside(tensors)
        self._look_for_the_rest(tensors)

    def _parameter_under(self, item: object) -> str | None:
        """Return the name of a trained parameter whose memory the object has."""
        return None if id(item) in self._ids else self._spans.over(span_of(item))

    def _look_in(self, model: nn.Module) -> None:
        anew = {id(tensor) for tensor in _set_anew(model)}
        for path, item in reached(model):
            if issubclass(type(item), Tensor) and id(item) not in self._ids:
                self._reached[id(item)] = item
            name = self._parameter_under(item)
            if name is not None and id(item) not in anew:
                self.kept.setdefault(name, path)

    def _tensors(self) -> list[Tensor]:
        """Return the tensors of the process over the memories, other than the model's parameters."""
        tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
        every, own = (*tensors, *self._reached.values()), self._memories
        tensors = [t for t in every if _storage_of(t) in own or self._parameter_under(t) is not None]
        bases = [base for tensor in tensors if (base := tensor._base) is not None]
        found = {id(tensor): tensor for tensor in (*tensors, *bases) if id(tensor) not in self._ids}
        return [*found.values()]

    def _look_outside(self, tensors: list[Tensor]) -> None:
        """Look at tensors that the model does not reach, over parameters of which it reaches no alias."""
        strays = [t for t in tensors if id(t) not in self._reached and self._parameter_under(t)]
        strays = [t for t in strays if self._parameter_under(t) not in self.kept]
        if not strays:
            return
        holders = Holders(strays, but=tensors)
        bases = {id(tensor._base) for tensor in tensors}
        for tensor in strays:
            name = self._parameter_under(tensor)
            assert name is not None
            if holders.of(tensor) or tensor._use_count() == 1:  # type: ignore[attr-defined]
                plain = id(tensor._base) not in self._ids and _is_whole(tensor, self._parameters[name])
                if plain and holders.only_by_name(tensor):
                    self.left.append(name)
                else:
                    self.kept.setdefault(name, holders.described(tensor))
            elif id(tensor._base) not in self._ids and id(tensor) not in bases:
                self.kept.setdefault(name, _NOT_PYTHONS)

    def _look_for_the_rest(self, tensors: Sequence[Tensor]) -> None:
        """Find memories whose use count tells of more users than there are tensors."""
        over: dict[int, list[Tensor]] = {key: [] for key in self._memories}
        for tensor in tensors:
            over.get(_storage_of(tensor), []).append(tensor)
        for key, memory in self._memories.items():
            if memory.users_without_name(over[key]) > 0 and not self.kept.keys() & memory.parameters.keys():
                name = next(name for name, p in memory.parameters.items() if p.requires_grad)
                self.kept[name] = _NOT_PYTHONS


def _is_whole(tensor: Tensor, parameter: nn.Parameter) -> bool:
    ours, theirs = ((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (tensor, parameter))
    return ours == theirs


def _set_anew(model: nn.Module) -> Iterator[Tensor]:
    """Yield attributes that hooks of torch.nn.utils compute before each forward of their modules."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            name = getattr(hook, "name", getattr(hook, "_tensor_name", None))
            value = vars(module).get(name) if isinstance(name, str) else None
            if isinstance(value, Tensor):
                yield value


def _storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage object; 0 if it has none, as in torch.func."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


_NOT_PYTHONS = (
    "something that is not Python's own, such as a DLPack capsule or an old graph of weight.detach()"
)
_STALE = (
    "Training would leave them behind with the values of now, because zero gives parameters memory of their "
    "own. Take the view in forward, from the parameter; register one Parameter in every module that uses it; "
    "or keep values that are to stay as they are with .clone()"
)
_LEFT = (
    "state dicts or variables of before zero.initialize share the memory of parameters. They keep the values "
    "of now, where plain training would change them, and the memory: del what is not needed, and call "
    "engine.state_dict() for the values of later. They hold"
)
