"""Checkpoints of any tensors, without an engine: a thread for each rank, a slice of each tensor in each."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from accelz import Group, current
from accelz.ranks.bounded_store import bounded
from accelz.ranks.peers import Peers
from zero.checkpoint.engine_state import RankState
from zero.checkpoint.rank_file import Part
from zero.checkpoint.save_job import RankSave
from zero.checkpoint.save_messages import SaveMessages
from zero.files.dtypes import name_of
from zero.files.publication import Publication
from zero.files.storage import DISK


def save(
    path: Path,
    tensors: Mapping[str, Tensor],
    ranks: int = 2,
    left_out: Sequence[str] = (),
    divided: Mapping[str, int] | None = None,
) -> None:
    """A checkpoint of parameters, stored as they are. left_out: names of what the model has besides. divided:
    the dimension along which ranks have blocks of a parameter, where they do."""
    along = divided or {}
    whole = {name: value for name, value in tensors.items() if name not in along}
    store = bounded(HashStore(), 60.0)
    failures: list[BaseException] = []

    def rank(number: int) -> None:
        parts = [part for name, value in whole.items() for part in _part(name, value, number, ranks)]
        own = {name: _block(tensors[name], dim, number, ranks) for name, dim in along.items()}
        at, mine = f"[tp={number}]", {name: block for name, (block, _) in own.items()}
        parts += [part for name, block in mine.items() for part in _part(name + at, block, 0, 1)]
        blocks = [
            {**each, "shape": tuple(tensors[n].shape), "blocks": [{"at": at, "runs": own[n][1]}]}
            for n, each in zip(mine, _parameters(mine), strict=True)
        ]
        messages = SaveMessages(Group(number, ranks, 60.0, store, cast(Any, None)), "synthetic", Peers())
        job = RankSave(
            messages, DISK, current(), Publication(DISK, path, None), RankState({"parameters": blocks}, parts)
        )
        job.described = {**_described(whole, ranks), "left_out": [*left_out]}
        try:
            job.run()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _part(name: str, value: Tensor, rank: int, ranks: int) -> list[Part]:
    """A rank's slice, in the tensor's memory order."""
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    flat = value.permute(order).reshape(-1)
    first, last = (flat.numel() * n // ranks for n in (rank, rank + 1))
    stride = None if value.is_contiguous() else tuple(value.stride())
    return [Part(f"model/{name}", tuple(value.shape), flat[first:last], first, stride)]


def _block(value: Tensor, dim: int, rank: int, ranks: int) -> tuple[Tensor, Any]:
    """A rank's block of a tensor, and the indices that it has of each dimension."""
    first, last = (value.shape[dim] * n // ranks for n in (rank, rank + 1))
    runs = [[(0, size)] if d != dim else [(first, last - first)] for d, size in enumerate(value.shape)]
    return value.narrow(dim, first, last - first).clone(), runs


def _parameters(tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    common = {"trainable": True, "unit": "u", "group": 0, "aliases": []}
    return [{"name": n, "dtype": name_of(value.dtype, n), **common} for n, value in tensors.items()]


def _described(tensors: Mapping[str, Tensor], ranks: int) -> dict[str, Any]:
    return {
        "zero": "0",
        "created": 0.0,
        "steps": 1,
        "world_size": ranks,
        "stage": 3,
        "precision": "fp32",
        "loss_scale": None,
        "optimizer": {"kind": "none", "param_groups": [{}]},
        "parameters": _parameters(tensors),
        "buffers": [],
        "extra_state": {"head._extra_state": 1},
        "state": {},
    }
