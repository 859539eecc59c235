"""An engine's whole weights in a folder, as transformers' and PEFT's `from_pretrained` read them.

The first rank writes them, and has one group of parameters whole at a time. The folder takes its name when
all of it is on the disk, if no rank has failed.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelz import HOST
from zero.config.output import DEFAULT_MEMORY, OutputDtype
from zero.consolidate.output import Converter, Output
from zero.consolidate.plan import choose, plan_safetensors
from zero.consolidate.publish import Staging
from zero.consolidate.run import translated
from zero.consolidate.workers import Buffers, chunk_bytes
from zero.errors import UsageError, some
from zero.files.dtypes import name_of
from zero.files.storage import Storage
from zero.loading.together import all_or_none
from zero.sharding.distributed import divided_along, is_distributed, whole_of
from zero.sharding.flat_group import FlatGroup
from zero.sharding.forms import descriptions
from zero.sharding.sharded_unit import ShardedUnit
from zero.sharding.state_entries import entries_of, state_of
from zero.sources.source import Chunk, Fragment, TensorInfo
from zero.warning import warn
from zero.whole.full_parameters import FullParameters, view_of
from zero.whole.gathered import gathered

Named = dict[str, Tensor]
_DTYPES: dict[torch.dtype | None, OutputDtype] = {
    None: "keep",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


@dataclass(frozen=True)
class Request:
    """The arguments of Engine.save_pretrained. storage: the file system; tests replace it."""

    path: Path
    dtype: torch.dtype | None
    max_shard_size: int
    storage: Storage

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise UsageError(
                f"dtype={self.dtype!r}: give torch.float32, torch.bfloat16 or torch.float16, "
                "or leave it out for each weight's dtype in training"
            )
        if self.max_shard_size < 1:
            raise UsageError(f"save_pretrained(max_shard_size={self.max_shard_size}): at least one byte")


def save(
    model: nn.Module, full: FullParameters, request: Request, state: Callable[..., dict[str, Any]]
) -> None:
    """Do what Engine.save_pretrained does. state: Engine.state_dict."""
    _check_plain(model, full)
    if has_adapter(model):
        called = _called(model)
        if called and request.dtype is not None:
            raise UsageError(
                "save_pretrained(dtype=...): PEFT computes prompts as it saves, in the dtype of training; "
                "leave dtype out"
            )
        with gathered(called):
            values = None if called else partial(state, include=added(model))
            _publish(_Adapters(model, request, values), full, request)
        return
    _publish(_Weights(model, full, request), full, request)


class _Content:
    """What a folder is to hold; all but `gather` is called on the first rank only."""

    def begin(self, folder: Path) -> None:
        """Prepare for writing to a folder."""

    def gather(self) -> None:
        """Collective. Errors of the disk wait for `complete`."""

    def complete(self, folder: Path) -> None:
        """Return once everything is on the disk."""

    def close(self) -> None:
        """Close all files, after an error too."""


def _publish(content: _Content, full: FullParameters, request: Request) -> None:
    staging: list[Staging] = []  # on the first rank

    @contextmanager
    def abandoning() -> Iterator[None]:
        try:
            with translated(request.path):
                yield
        except BaseException:
            for each in staging:
                content.close()
                each.abandon()
            raise

    def begin() -> None:
        with abandoning():
            if _writes(full):
                new = Staging(request.storage, request.path, overwrite=True, among_others=True)
                new.begin(uuid.uuid4().bytes)  # a later call has other weights, and resumes nothing
                staging.append(new)
                content.begin(new.path)

    def finish() -> None:
        with abandoning():
            for each in staging:
                content.complete(each.path)
                each.commit()
                each.release()

    all_or_none(full.communicator, str(request.path), begin, everywhere=True, doing="save")
    with abandoning():
        content.gather()
    all_or_none(full.communicator, str(request.path), finish, everywhere=True, doing="save")
    every, nothing = full.communicator.whole, torch.zeros(1, dtype=torch.int64, device=HOST)
    full.communicator.highest("save_pretrained", nothing, every)  # rank 0 may end next, and all its answers


def _writes(full: FullParameters) -> bool:
    """Whether this rank is the first of the job."""
    return full.communicator.whole.rank == 0


def _check_plain(model: nn.Module, full: FullParameters) -> None:
    """Raise UsageError for a model whose weights transformers would not find in such a folder."""
    has_mesh = full.communicator.grid.told
    every = [
        (group, parameter) for unit in full.units for group in unit.groups for parameter in group.parameters
    ]
    if has_mesh and any(not group.mesh.apart <= set(divided_along(parameter)) for group, parameter in every):
        raise UsageError(f"save_pretrained(): ranks of the mesh have different parameters. {_OTHERWISE}")
    parts = [name for name, parameter in model.named_parameters() if is_distributed(parameter)]
    if parts and (has_adapter(model) or not has_mesh):
        raise UsageError(
            f"save_pretrained(): ranks have parts of DTensors, such as {some(parts)}. {_OTHERWISE}"
        )
    if has_adapter(model):
        return
    packed = [parameter for parameter in descriptions(model) if not is_distributed(parameter)]
    if packed or getattr(model, "hf_quantizer", None) is not None:
        raise UsageError(f"save_pretrained(): the model's weights are packed (quantised). {_OTHERWISE}")


_OTHERWISE = "Save it by engine.save_checkpoint(folder); `zero consolidate` writes the weights of that"


class _Weights(_Content):
    """All of a model, in the layout of transformers."""

    def __init__(self, model: nn.Module, full: FullParameters, request: Request) -> None:
        self._model = model
        self._full = full
        self._request = request
        self._convert = _converter(model)
        self._entries, state = entries_of(model), state_of(model)
        # As transformers, of tied ones the name that it does not tie to another.
        tied, ignored = (_names(model, each) for each in ("all_tied_weights_keys", "_keys_to_ignore_on_save"))
        self._names = {
            parameter: sorted((n for n in names if n in state), key=lambda name: name in tied)
            for parameter, names in self._entries.parameters.items()
            if ignored.isdisjoint(names)
        }
        self._buffers = {n: b for n, b in self._entries.buffers.items() if n not in ignored}
        self._output: Output | None = None
        self._failure: Exception | None = None

    def begin(self, folder: Path) -> None:
        if self._entries.rest:
            warn(
                "save_pretrained() leaves out what is not a parameter or buffer: "
                f"{some(list(self._entries.rest))}"
            )
        _describe(self._model, folder, self._request)
        infos = self._planned()
        tensors = tuple(infos)
        plan = plan_safetensors(
            choose(tensors, _DTYPES[self._request.dtype], (), ()), self._request.max_shard_size
        )
        self._places = {info.name: index for index, info in enumerate(tensors)}
        self._buffer = Buffers(chunk_bytes(DEFAULT_MEMORY, 1))
        with translated(self._request.path, sum(file.nbytes for file in plan.files)):
            self._output = Output(self._request.storage, folder, plan, Converter(plan, tensors))

    def gather(self) -> None:
        with self._full.communicator.together():
            for unit, group in self._groups():
                flat = self._full.gather(unit, group, self._values(group))
                parts = {
                    n: (group.parameters[i], view_of(flat, group, i)) for i, n in self._named(group).items()
                }
                whole = {n: whole_of(parameter, block) for n, (parameter, block) in parts.items()}
                if _writes(self._full):
                    self._write(whole)
        if _writes(self._full):
            self._write(self._buffers)

    def complete(self, folder: Path) -> None:
        self.close()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        if self._output is not None:
            self._output.close()

    def _groups(self) -> Iterator[tuple[ShardedUnit, FlatGroup]]:
        return ((unit, group) for unit in self._full.units for group in unit.groups)

    def _values(self, group: FlatGroup) -> Any:
        return group.shard if self._request.dtype is None else group.widest

    def _named(self, group: FlatGroup) -> dict[int, str]:
        """The names to write a group's parameters under, by their index in it."""
        found = {index: self._names.get(parameter) for index, parameter in enumerate(group.parameters)}
        return {index: names[0] for index, names in found.items() if names}

    def _write(self, values: Named) -> None:
        """Write tensors, unless an earlier one could not be written."""
        if self._failure is not None:
            return
        try:
            with translated(self._request.path):
                for name, value in self._convert({n: v.detach().to(HOST) for n, v in values.items()}).items():
                    self._write_one(name, value)
        except Exception as error:
            self._failure = error

    def _write_one(self, name: str, value: Tensor) -> None:
        if value.numel() and self._output is not None:
            flat = value.contiguous().reshape(-1).view(torch.uint8).numpy().data
            pieces = (Fragment(self._places[name], 0, value.numel(), 0),)
            self._output.write(Chunk(len(flat), lambda _: flat, pieces), self._buffer)

    def _planned(self) -> Iterator[TensorInfo]:
        """The tensors to write. Raises UsageError where transformers would convert some of several groups
        into one."""
        sets: list[Named] = []
        for _, group in self._groups():
            shapes = {n: group.parameters[i].shape for i, n in self._named(group).items()}
            sets.append({n: _blank(shape, self._values(group).dtype) for n, shape in shapes.items()})
        sets.append({n: _blank(buffer.shape, buffer.dtype) for n, buffer in self._buffers.items()})
        parts = {name: value for each in sets for name, value in self._convert(each).items()}
        whole = self._convert({name: value for each in sets for name, value in each.items()})
        if {n: v.shape for n, v in parts.items()} != {n: v.shape for n, v in whole.items()}:
            raise UsageError(
                "transformers makes one tensor of several of this model when it saves, and they are in "
                "different units: call model.save_pretrained(folder, state_dict=engine.state_dict())"
            )
        aliases = {names[0]: tuple(names[1:]) for names in self._names.values() if names}
        for name, value in parts.items():
            dtype = name_of(value.dtype, name)
            yield TensorInfo(name, tuple(value.shape), dtype, dtype, "parameter", aliases.get(name, ()))


class _Adapters(_Content):
    """What PEFT has added to a model; it makes its files at the end.

    state(): its values on the first rank; None where they are gathered.
    """

    def __init__(self, model: Any, request: Request, state: Callable[[], dict[str, Any]] | None) -> None:
        self._model = model
        self._request = request
        self._state = state
        self._found: dict[str, Any] | None = None

    def gather(self) -> None:
        if self._state is not None:
            self._found = {name: self._cast(value) for name, value in self._state().items()}

    def _cast(self, value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self._request.dtype) if floating and self._request.dtype else value

    def complete(self, folder: Path) -> None:
        with _saving_here(self._model):
            self._model.save_pretrained(folder, state_dict=self._found)


# -- what transformers and PEFT say of a model ------------------------------------------------------------


def has_adapter(model: nn.Module) -> bool:
    """Whether this is a model of PEFT, or of transformers with adapters: it is saved without its base."""
    own = getattr(model, "_hf_peft_config_loaded", False)  # of model.add_adapter and load_adapter
    return hasattr(model, "peft_config") and (own or hasattr(model, "get_base_model"))


def added(model: Any) -> list[str]:
    """Names of what PEFT may save: what is trained, all adapters, and embeddings, which it takes where they
    were resized."""
    own = {parameter for module in _embeddings(model) for parameter in module.parameters()}
    adapters = [f".{name}." for name in model.peft_config]
    return [
        escape(name)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.requires_grad or tensor in own or any(adapter in f"{name}." for adapter in adapters)
    ]


def _called(model: Any) -> list[nn.Parameter]:
    """The parameters of what PEFT calls as it saves: to compute prompts, modules, which need all units."""
    prompts = any(each.is_prompt_learning for each in model.peft_config.values())
    return list(model.parameters()) if prompts else []


def _embeddings(model: Any) -> Iterator[nn.Module]:
    """The embeddings that a model tells of: a plain module tells of none, and neither do some of
    transformers' models."""
    for name in ("get_input_embeddings", "get_output_embeddings"):
        with suppress(NotImplementedError):
            module = getattr(model, name, lambda: None)()
            if module is not None:
                yield module


def _transformers(model: nn.Module) -> bool:
    """Whether this is a model of transformers, which is not imported here."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return kind is not None and isinstance(model, kind)


def _converter(model: nn.Module) -> Callable[[Named], Named]:
    """What transformers does to weights when it saves: experts of one parameter have names of their own."""
    loading = sys.modules.get("transformers.core_model_loading")
    if loading is None or not _transformers(model):
        return lambda named: named
    return partial(loading.revert_weight_conversion, model)


def _describe(model: Any, folder: Path, request: Request) -> None:
    """Write the model's config.json and whatever else `from_pretrained` reads besides weights."""
    if not _transformers(model):
        return
    plan = vars(model.config).pop("distributed_config", None)  # for which all ranks would have to call it
    try:
        with _saving_here(model):
            model.save_pretrained(folder, state_dict={})  # writes no file of weights
    finally:
        if plan is not None:
            model.config.distributed_config = plan
    if request.dtype is not None:
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["dtype"] = str(request.dtype).removeprefix("torch.")
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _saving_here(model: nn.Module) -> Iterator[None]:
    """Have transformers write on this rank: by itself it does on torch's first, which may have no engine."""
    vars(model)["should_save_on_this_rank"] = bool
    try:
        yield
    finally:
        del vars(model)["should_save_on_this_rank"]


def _names(model: nn.Module, attribute: str) -> set[str]:
    return set(getattr(model, attribute, None) or ())


def _blank(shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
