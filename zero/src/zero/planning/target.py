"""The model that `zero plan` is asked about: made by a function, or guessed from names in a checkpoint."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero.config.deepspeed import from_deepspeed
from zero.config.offload import Offload
from zero.config.settings_file import read_settings
from zero.config.training import Config
from zero.deferred.deferred_init import is_deferred, outlined
from zero.errors import OptimizerError, UsageError
from zero.files.boundary import typed
from zero.files.dtypes import TORCH
from zero.optimizer.kernel_rules import SERVED
from zero.sources.opening import open_source
from zero.sources.source import TensorInfo

DEEPSPEED = {"zero_optimization", "bf16", "fp16", "train_batch_size", "train_micro_batch_size_per_gpu"}
"""Keys that only DeepSpeed's settings have."""


def model_of(target: str) -> nn.Module:
    """The model that `target` names, without memory for its parameters.

    target: "package.module:function" or "file.py:function", which returns the model, or an expression in
    place of the function, "transformers:LlamaForCausalLM(LlamaConfig())"; or the path of a checkpoint or of
    weights, in any format that is read. Raises UsageError for what is none of these, CheckpointError for what
    cannot be read.
    """
    place, colon, expression = target.partition(":")
    if is_guessed(target):
        if target.endswith(".py"):
            raise UsageError(
                f"{target} contains more than a model: write {target}:function for a function that returns "
                "the model"
            )
        with open_source(target) as source, typed(source.path):
            return from_names(source.tensors)
    if not colon or not expression:
        raise UsageError(
            f"{target!r} is neither a path nor a function: write package.module:function or file.py:function "
            "for a function that returns the model, or the path of a checkpoint or of weights"
        )
    names = _Names(_imported(place))
    try:
        with outlined():
            found = eval(expression, names)
            model = found() if callable(found) and not isinstance(found, nn.Module) else found
        _forget_values(model)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{target}: {type(error).__name__}: {error}{_meant(error, names)}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{target} is {type(model).__name__}, not a torch.nn.Module")
    return model


def _meant(error: BaseException, names: _Names) -> str:
    """The names that are most like one that is not there, to end a message with."""
    if not isinstance(error, (NameError, AttributeError)) or not error.name:
        return ""
    known = dir(error.obj) if isinstance(error, AttributeError) else names.all()
    alike = get_close_matches(error.name, known)
    return f"; did you mean {' or '.join(map(repr, alike))}?" if alike else ""


def batch_of(model: nn.Module, rows: int, length: int) -> Any:
    """Token ids of a batch, without values: as `input_ids` and `labels`, if the model's forward has such
    arguments, or as its first argument."""
    tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
    known = inspect.signature(model.forward).parameters
    return {name: tokens for name in ("input_ids", "labels") if name in known} or tokens


def _forget_values(model: object) -> None:
    """Turn parameters that were to get values into shapes alone: some optimizers, such as Adagrad, make their
    state from parameters as soon as they are built."""
    shapes: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules() if isinstance(model, nn.Module) else ():
        for name, parameter in module._parameters.items():
            if parameter is not None and is_deferred(parameter):
                shapes.setdefault(parameter, _shape_of(parameter))
                module._parameters[name] = shapes[parameter]


def _shape_of(parameter: nn.Parameter) -> nn.Parameter:
    shape, stride = tuple(parameter.shape), parameter.stride()
    values = torch.empty_strided(shape, stride, dtype=parameter.dtype, device="meta")
    return nn.Parameter(values, parameter.requires_grad)


def is_guessed(target: str) -> bool:
    """Whether the target has names of parameters only, and no classes."""
    return os.path.exists(target)


class _Names(dict[str, Any]):
    """The names of a module, including those that it makes only when they are asked for."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(vars(module))
        self._module = module

    def all(self) -> list[str]:
        return sorted({*self, *dir(self._module)})

    def __missing__(self, name: str) -> Any:
        try:
            return getattr(self._module, name)
        except AttributeError:
            raise KeyError(name) from None


def _imported(place: str) -> ModuleType:
    """A module, or a file as one, which may import what lies beside it; both, what lies here."""
    sys.path.insert(0, "")
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        sys.path.insert(0, str(Path(place).resolve().parent))
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses, for one, look for it
        spec.loader.exec_module(module)
        return module
    except (Exception, SystemExit) as error:
        raise UsageError(f"{place!r} cannot be imported: {type(error).__name__}: {error}") from error


def from_names(tensors: tuple[TensorInfo, ...]) -> nn.Module:
    """A model with these parameters: a module for each dot in a name and, where all children have numbers, a
    dict of blocks."""
    root: dict[str, Any] = {}
    for tensor in tensors:
        dtype = TORCH[tensor.training_dtype]
        if tensor.kind in ("parameter", "frozen") and dtype.is_floating_point:
            shape = torch.empty(tensor.shape, dtype=dtype, device="meta")
            parameter = nn.Parameter(shape, tensor.kind == "parameter")
            for name in (tensor.name, *tensor.aliases):
                _put(root, name.split("."), parameter)
    if not root:
        raise UsageError("it contains no parameters")
    return _module(root)


def _put(tree: dict[str, Any], path: list[str], parameter: nn.Parameter) -> None:
    *parents, last = path
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise UsageError(f"{'.'.join(path)!r} is inside {parent!r}, which is itself a parameter")
    if last in tree:
        raise UsageError(f"{'.'.join(path)!r} is a parameter, but other parameters are inside it")
    tree[last] = parameter


def _module(tree: Mapping[str, Any]) -> nn.Module:
    children = {name: _module(child) for name, child in tree.items() if isinstance(child, dict)}
    if children and len(children) == len(tree) and all(name.isdigit() for name in children):
        return nn.ModuleDict(children)
    module = nn.Module()
    for name, child in tree.items():  # past register_parameter, which keeps "type" and others for modules
        if name in children:
            module._modules[name] = children[name]
        else:
            module._parameters[name] = child
    return module


def settings(file: Path | None, changes: Mapping[str, Any], ranks: int) -> Config:
    """The settings in a JSON file, zero's or DeepSpeed's, with some of them changed. ranks: of the job that
    DeepSpeed's batch sizes are for. Raises ConfigError."""
    given = {} if file is None else read_settings(file, "a file of settings")
    if DEEPSPEED & given.keys():
        config = from_deepspeed(given, ranks)
        given = {name: getattr(config, name) for name in config.model_fields_set}
    return Config(**{**given, **changes})


def offload_of(pairs: list[str]) -> Offload | str:
    """Settings out of "optimizer=host", "params=disk", "path=/local", "fraction=0.5"; or "auto"."""
    if pairs == ["auto"]:
        return "auto"
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--offload {pair}: write e.g. optimizer=host, or auto")
        found[key] = value if key == "path" else _value_of(value, float if key == "fraction" else int)
    return Offload(**found)


def _value_of(text: str, number: type[int] | type[float]) -> Any:
    try:
        return number(text)
    except ValueError:
        return {"true": True, "false": False}.get(text.lower(), text)


def options_of(text: str) -> dict[str, Any]:
    """An optimizer's options out of JSON. Raises UsageError."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--optimizer-options {text}: {error}") from error
    if not isinstance(options, dict):
        raise UsageError(f"--optimizer-options {text}: write an object, such as '{{\"momentum\": 0.9}}'")
    return options


def optimizers_of(name: str, options: Mapping[str, Any], model: nn.Module) -> list[Optimizer]:
    """An optimizer of torch.optim, or one of ours, by its name in any case. Muon steps the matrices, with
    AdamW for the rest. Raises OptimizerError."""
    of_torch = [c for n, c in vars(torch.optim).items() if isinstance(c, type) and n != "Optimizer"]
    known = {kind.__name__.lower(): kind for kind in (*of_torch, *SERVED)}
    kind = known.get(name.lower())
    if kind is None:
        raise OptimizerError(f"torch.optim has no {name!r}; known: {', '.join(sorted(known))}")
    chosen = [p for p in model.parameters() if kind is not torch.optim.Muon or p.dim() == 2]
    rest = [p for p in model.parameters() if kind is torch.optim.Muon and p.dim() != 2]
    try:
        made = [kind(chosen, **options)]
    except Exception as error:  # whatever an optimizer's constructor raises for wrong values
        raise OptimizerError(f"{name} with {dict(options)}: {error}") from error
    return [*made, torch.optim.AdamW(rest)] if rest else made
