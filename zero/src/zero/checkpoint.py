"""A checkpoint of whole tensors: `model.safetensors` (fp32 masters and buffers), `optimizer.safetensors`
and `state.json` in one directory, written by rank 0 and replaced as a whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from zero import model_state
from zero.errors import UsageError
from zero.optimizer_state import OptimizerState
from zero.whole import WholeValues

FORMAT = 1
_SEPARATOR = "::"  # between a parameter's name and the key of its optimizer state


def save(
    path: Path, model: nn.Module, whole: WholeValues, optimizer: OptimizerState, meta: Mapping[str, Any]
) -> None:
    """Write the checkpoint `path`; the previous one stays whole until the new one is complete.

    meta: JSON values. Raises UsageError if they are not, StateError if the files cannot be written.
    """
    try:
        text = json.dumps({"format": FORMAT, **meta})
    except (TypeError, ValueError) as error:
        raise UsageError(f"extra must hold JSON values only: {error}") from error
    tensors = model_state.read(model, whole, master=True)
    states = optimizer.read()
    problem = ""
    if whole.is_source:
        try:
            _write(path, _untied(model, tensors), states, text)
        except OSError as error:
            problem = f"the checkpoint {path} could not be written: {error}"
    whole.raise_together(problem)


def load(path: Path, model: nn.Module, whole: WholeValues, optimizer: OptimizerState) -> dict[str, Any]:
    """Read the checkpoint `path` on rank 0, distribute it, and return its `meta` on every rank."""
    problem = ""
    meta: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    states: dict[str, dict[str, Tensor]] = {}
    if whole.is_source:
        try:
            meta, tensors, states = _read(path)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            problem = f"{path} is no complete checkpoint: {type(error).__name__}: {error}"
    whole.raise_together(problem)
    model_state.load(model, whole, _retied(model, tensors), strict=True)
    optimizer.load(states)
    return dict(whole.share(meta))


def _write(path: Path, model: dict[str, Tensor], optimizer: dict[str, dict[str, Tensor]], text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (path.with_name(f".{path.name}.{suffix}") for suffix in ("new", "old"))
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir()
    flat = {f"{n}{_SEPARATOR}{k}": v for n, state in optimizer.items() for k, v in state.items()}
    save_file({n: v.contiguous() for n, v in model.items()}, fresh / "model.safetensors", {"format": "pt"})
    save_file(flat, fresh / "optimizer.safetensors")
    (fresh / "state.json").write_text(text)
    for file in fresh.iterdir():
        shutil.copymode(fresh / "state.json", file)  # safetensors would make them private
        _sync(file)
    _sync(fresh)
    if path.exists():
        path.rename(old)
    fresh.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    meta = json.loads((path / "state.json").read_text())
    if meta["format"] != FORMAT:
        raise ValueError(f"format {meta['format']}, this version reads {FORMAT}")
    optimizer: dict[str, dict[str, Tensor]] = {}
    for key, value in load_file(path / "optimizer.safetensors").items():
        name, _, state = key.rpartition(_SEPARATOR)
        optimizer.setdefault(name, {})[state] = value
    return meta, load_file(path / "model.safetensors"), optimizer


def _untied(model: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor under one name: safetensors stores no aliases."""
    own = {name for name, _ in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {n: v for n, v in tensors.items() if isinstance(v, Tensor) and (n in own or n not in every)}


def _retied(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    first = {parameter: name for name, parameter in model.named_parameters()}
    aliases = model.named_parameters(remove_duplicate=False)
    return {**tensors, **{n: tensors[first[p]] for n, p in aliases if first[p] in tensors}}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
