"""Checkpoints laid out as DeepSpeed 0.19.8 does, without DeepSpeed; compared with real ones by hand.

The classes that DeepSpeed pickles are made here under its names.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
_PLACES = {
    "ZeroStageEnum": "deepspeed.runtime.zero.config",
    "LossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "DynamicLossScaler": "deepspeed.runtime.fp16.loss_scaler",
    "fragment_address": "deepspeed.utils.tensor_fragment",
}


class ZeroStageEnum(IntEnum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale = 1.0


class DynamicLossScaler(LossScaler):
    pass


@dataclass
class fragment_address:
    numel: int
    start: int


@dataclass
class Model:
    """What is saved. groups: names and fp32 masters of each param group. frozen, buffers: 16-bit or other
    values. tied: alias to name."""

    groups: list[State]
    frozen: State = field(default_factory=dict)
    buffers: State = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)

    @property
    def masters(self) -> State:
        return {name: value for group in self.groups for name, value in group.items()}

    def expected(self) -> State:
        """What a reader has to find, in fp32."""
        state = self.masters | self.frozen | self.buffers
        state |= {alias: state[name] for alias, name in self.tied.items()}
        return {name: v.float() if v.is_floating_point() else v for name, v in state.items()}


@dataclass
class Layout:
    """How it is saved. sub_group: elements of a rank after which a sub-group of stage 3 closes. gap: elements
    between the parameters of stages 1 and 2. named_stage: BF16_Optimizer, for one, leaves zero_stage out."""

    stage: int = 3
    ranks: int = 2
    prefix: str = "bf16_"
    dtype: torch.dtype = torch.bfloat16
    sub_group: int = 10**9
    gap: int = 0
    named_stage: bool = True
    tag: str = "global_step3"
    step: int = 3


def save(folder: Path, model: Model, layout: Layout) -> Path:
    """Write a checkpoint and `latest`; returns the tag's directory."""
    tag = folder / layout.tag
    tag.mkdir(parents=True)
    groups = _sub_groups(model, layout) if layout.stage == 3 else model.groups
    with pickled_as_deepspeed():
        for rank in range(layout.ranks):
            name = f"{layout.prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save(optimizer_states(groups, layout, rank), tag / name)
            if layout.stage == 3:
                name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
                torch.save(model_states(model, groups, layout, rank), tag / name)
        if layout.stage < 3:
            torch.save(model_states(model, groups, layout, 0), tag / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text(layout.tag)
    return tag


def save_universal(folder: Path, model: Model, layout: Layout) -> Path:
    """What ds_to_universal makes of a checkpoint: at stage 3 flat and bare, else whole and in a dict."""
    sharded = save(folder / "sharded", model, layout)
    tag = folder / f"{layout.tag}_universal"
    for name, value in model.masters.items():
        (tag / "zero" / name).mkdir(parents=True)
        content = value.flatten() if layout.stage == 3 else {"cat_dim": 0, "param": value}
        torch.save(content, tag / "zero" / name / "fp32.pt")
    for path in sharded.glob("*_model_states.pt"):
        path.rename(tag / path.name)
    (folder / "latest_universal").write_text(tag.name)
    return tag


def optimizer_states(groups: Sequence[State], layout: Layout, rank: int) -> dict[str, Any]:
    flat = [_shard(group, layout, rank) for group in groups]
    moments = {
        i: {"step": torch.tensor(float(layout.step)), "exp_avg": v * 0, "exp_avg_sq": v * 0}
        for i, v in enumerate(flat)
    }
    inner = {"state": moments, "param_groups": [{"lr": 0.1, "params": [i]} for i in range(len(flat))]}
    state: dict[str, Any] = {"loss_scaler": LossScaler(), "overflow": False, "clip_grad": 1.0}
    if layout.named_stage:
        state["zero_stage"] = ZeroStageEnum(layout.stage)
    if layout.stage == 3:
        state |= {"partition_count": layout.ranks, "optimizer_state_dict": inner, "fp32_flat_groups": flat}
    else:
        state |= {
            "base_optimizer_state": inner,
            "single_partition_of_fp32_groups": flat,
            "partition_count": [layout.ranks] * len(flat),
            "param_alignment_paddings": [[layout.gap] * len(group) for group in groups],
            "param_slice_mappings": [OrderedDict(first=fragment_address(1, 0)) for _ in groups],
        }
    return {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"}


def model_states(model: Model, groups: Sequence[State], layout: Layout, rank: int) -> dict[str, Any]:
    whole = model.masters | model.frozen
    module: OrderedDict[str, Tensor] = OrderedDict(
        (name, value.to(layout.dtype) if layout.stage < 3 else torch.empty(0, dtype=layout.dtype))
        for name, value in whole.items()
    )
    module |= model.frozen if layout.stage < 3 else {}
    module |= model.buffers
    module |= {alias: module[name] for alias, name in model.tied.items()}
    fragments = {
        n: _share(v, layout.ranks, rank) if layout.stage == 3 else v for n, v in model.frozen.items()
    }
    return {
        "module": module,
        "buffer_names": list(model.buffers),
        "param_shapes": [OrderedDict((n, v.shape) for n, v in group.items()) for group in groups],
        "frozen_param_shapes": OrderedDict((n, v.shape) for n, v in model.frozen.items()),
        "frozen_param_fragments": OrderedDict(fragments),
        "shared_params": dict(model.tied) if rank == 0 else {},
        "global_steps": layout.step,
        "ds_version": "0.19.8",
    }


def _sub_groups(model: Model, layout: Layout) -> list[State]:
    """A sub-group closes once a rank's share of it reaches the limit."""
    found: list[State] = []
    for group in model.groups:
        filling: State = {}
        for name, value in group.items():
            filling[name] = value
            if sum(math.ceil(v.numel() / layout.ranks) for v in filling.values()) >= layout.sub_group:
                found.append(filling)
                filling = {}
        if filling:
            found.append(filling)
    return found


def _shard(group: Mapping[str, Tensor], layout: Layout, rank: int) -> Tensor:
    """A rank's part of the flat masters of a group."""
    if layout.stage == 3:
        return torch.cat([_share(v, layout.ranks, rank) for v in group.values()])
    gap = torch.full((layout.gap,), math.nan)
    whole = torch.cat([part for value in group.values() for part in (value.flatten(), gap)])
    size = math.ceil(whole.numel() / (2 * layout.ranks)) * 2  # the last ranks' padding is not saved
    return whole[rank * size : (rank + 1) * size].clone()


def _share(value: Tensor, ranks: int, rank: int) -> Tensor:
    """One rank's elements; what fills the last is uninitialised memory, so that nobody may look at it."""
    size = math.ceil(value.numel() / ranks)
    mine = value.flatten()[rank * size : (rank + 1) * size]
    padding = torch.full((size - mine.numel(),), math.nan).to(value.dtype)
    return torch.cat([mine, padding])


@contextmanager
def pickled_as_deepspeed() -> Iterator[None]:
    """While it lasts, the classes above belong to DeepSpeed's modules."""
    kinds = {kind.__name__: kind for kind in (ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address)}
    homes = {kind: kind.__module__ for kind in kinds.values()}
    names = {".".join(place.split(".")[:n]) for place in _PLACES.values() for n in range(1, 5)}
    sys.modules.update({name: ModuleType(name) for name in names})
    for name, kind in kinds.items():
        setattr(sys.modules[_PLACES[name]], name, kind)
        kind.__module__ = _PLACES[name]
    try:
        yield
    finally:
        for kind, home in homes.items():
            kind.__module__ = home
        for name in names:
            del sys.modules[name]
