"""Exporting zero's checkpoints as DeepSpeed universal ones, which load at any stage and number of ranks.

    latest_universal                          the tag's name
    <tag>/mp_rank_00_model_states.pt          step count, names, frozen parameters, buffers: for stages 1, 2
    <tag>/zero_pp_rank_0_mp_…_states.pt       the same for stage 3, without tensors
    <tag>/zero/optimizer_state.pt             options of the param_groups
    <tag>/zero/<parameter>/fp32.pt            {"param": the whole master}; also exp_avg.pt, exp_avg_sq.pt, …
    <tag>/zero/<parameter>/step.pt            the optimizer's step of the parameter

DeepSpeed 0.19.8 loads it with `"checkpoint": {"load_universal": true}`. It takes the trainable parameters,
their optimizer state and the step count; it leaves frozen parameters and buffers to the job.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelz import HOST
from zero.consolidate.plan import Chosen, OutputPlan, PlannedFile, choose
from zero.consolidate.run import OnProgress, Options, Written, publish
from zero.consolidate.torch_plan import plan_file
from zero.files.boundary import typed
from zero.files.dtypes import TORCH
from zero.files.manifest import Manifest, ParameterEntry, model_key, state_key
from zero.files.storage import DISK
from zero.loading.tensor_reader import TensorReader
from zero.sources.deepspeed_files import LATEST_UNIVERSAL, MASTERS, SHARDED_MODEL, WHOLE_MODEL, master_file
from zero.sources.zero_checkpoint import ZeroSource, elementwise_state

_VERSION = "0.19.8"  # of DeepSpeed, whose layout this is
_UNIVERSAL_VERSION = 0.2  # of DeepSpeed's universal checkpoints without pieces of model-parallel layers
_SCHEDULERS = ("lr_scheduler", "scheduler")  # names by which the caller's state may have one


def export_universal(
    source: ZeroSource,
    out: str | Path,
    options: Options | None = None,
    progress: OnProgress = lambda *_: None,
) -> Written:
    """Write `source` as a universal checkpoint to the directory `out`.

    It appears in one step, and errors are the same, as with consolidate(). source: opened with the
    optimizer's state. options: format, dtype and max_shard_size have no meaning here.
    """
    options = options or Options(dtype="fp32")
    with typed(source.path):
        export = _Export(source, _chosen(source, options))
        plan = OutputPlan(tuple(export.files()), dict(export.small_files()))

    def complete(directory: Path) -> None:
        for path in sorted(directory.rglob("*")):
            if path.is_dir():
                DISK.sync_directory(path)

    return publish(source, plan, Path(out), options, progress, DISK, complete)


def _chosen(source: ZeroSource, options: Options) -> dict[str, Chosen]:
    """The tensors to write, by name: patterns select parameters and buffers; optimizer state comes along."""
    model = [info for info in source.tensors if info.kind != "state"]
    left = {tensor.name for tensor in choose(model, "fp32", options.include, options.exclude)}
    kinds = {info.name: info.kind for info in source.tensors}
    every = choose(source.tensors, "fp32", (), ())
    return {t.name: t for t in every if t.name in left or kinds[t.name] == "state"}


class _Export:
    """The contents of the files. chosen: the tensors to write, by name."""

    def __init__(self, source: ZeroSource, chosen: Mapping[str, Chosen]) -> None:
        self._manifest: Manifest = source.checkpoint.manifest
        self._reader = TensorReader(source.checkpoint)
        self._chosen = chosen
        kinds = {info.name: info.kind for info in source.tensors}
        self._buffers = [name for name in chosen if kinds[name] == "buffer"]
        self._parameters = [p for p in self._manifest.parameters if p.name in chosen]
        self._trained = [p for p in self._parameters if p.trainable]
        self._frozen = [p for p in self._parameters if not p.trainable]
        self._tag = f"global_step{self._manifest.steps}_universal"

    def files(self) -> Iterator[PlannedFile]:
        """The files with tensors of the source."""
        for parameter in self._trained:
            yield self._tensor_file(parameter.name, parameter.name, "fp32")
            for key in elementwise_state(self._manifest, parameter):
                yield self._tensor_file(parameter.name, state_key(key, parameter.name), key)
        whole = [self._chosen[name] for name in (*(p.name for p in self._frozen), *self._buffers)]
        yield plan_file(f"{self._tag}/{WHOLE_MODEL}", whole, self._model_states)

    def small_files(self) -> Iterator[tuple[str, bytes]]:
        """All other files: names and contents."""
        for parameter in self._trained:
            if "step" in parameter.state:
                step = self._reader.whole(state_key("step", parameter.name)).float()
                yield self._name(parameter.name, "step"), _saved(step.reshape(()))
        yield f"{self._tag}/{MASTERS}/optimizer_state.pt", _saved(self._optimizer_state())
        yield f"{self._tag}/{SHARDED_MODEL}", _saved(self._common())
        yield LATEST_UNIVERSAL, self._tag.encode()

    def _name(self, parameter: str, key: str) -> str:
        return str(master_file(Path(self._tag), parameter).with_name(f"{key}.pt"))

    def _tensor_file(self, parameter: str, name: str, key: str) -> PlannedFile:
        tensor = self._chosen[name]
        return plan_file(
            self._name(parameter, key), [tensor], lambda values: {"param": values[tensor.tensor]}
        )

    def _model_states(self, values: Mapping[int, Tensor]) -> dict[str, Any]:
        frozen = OrderedDict((p.name, values[self._chosen[p.name].tensor]) for p in self._frozen)
        buffers = {name: values[self._chosen[name].tensor] for name in self._buffers}
        empty = {p.name: torch.empty(0, dtype=TORCH[p.dtype], device=HOST) for p in self._trained}
        return {
            **self._common(),
            "module": OrderedDict({**frozen, **buffers, **empty}),
            "buffer_names": self._buffers,
            "frozen_param_shapes": OrderedDict((name, value.shape) for name, value in frozen.items()),
            "frozen_param_fragments": frozen,
        }

    def _common(self) -> dict[str, Any]:
        """Model states without tensors of the source."""
        state, scale = self._reader.decode(self._manifest.state), self._manifest.loss_scale
        scheduler = next((state[key] for key in _SCHEDULERS if key in state), None)
        shared = {alias: p.name for p in self._parameters for alias in p.aliases}
        return {
            "module": OrderedDict(),
            "param_shapes": list(self._shapes_by_group()),
            "shared_params": shared,
            "global_steps": self._manifest.steps,
            "skipped_steps": 0 if scale is None else scale.skipped_steps,
            "dp_world_size": self._manifest.world_size,
            "mp_world_size": 1,
            "lr_scheduler": scheduler,
            "zero_state": state,
            "ds_version": _VERSION,
            "universal_checkpoint_info": {"universal_checkpoint_version": _UNIVERSAL_VERSION},
        }

    def _shapes_by_group(self) -> Iterator[OrderedDict[str, torch.Size]]:
        groups: dict[int | None, list[ParameterEntry]] = {}
        for parameter in self._trained:
            groups.setdefault(parameter.group, []).append(parameter)
        for parameters in groups.values():
            shapes = ((p.name, self._manifest.tensor(model_key(p.name)).shape) for p in parameters)
            yield OrderedDict((name, torch.Size(shape)) for name, shape in shapes)

    def _optimizer_state(self) -> dict[str, Any]:
        """State that is not by parameter, both where stages 1 and 2 look for it and where stage 3 does."""
        options = [dict(self._reader.decode(g)) for g in self._manifest.optimizer.param_groups]
        groups = [{**group, "params": [number]} for number, group in enumerate(options)]
        stepped = next((p.name for p in self._trained if "step" in p.state), None)
        step = {} if stepped is None else {"step": self._reader.whole(state_key("step", stepped)).float()}
        return {
            "param_groups": groups,
            "optimizer_state_dict": {"state": {0: step}, "param_groups": groups},
            "ds_version": _VERSION,
        }


def _saved(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()
