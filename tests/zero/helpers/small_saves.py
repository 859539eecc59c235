"""Two-rank saves of a few tensors, without an engine: two threads over any storage."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from accelz import Group, current
from accelz.ranks.bounded_store import bounded
from accelz.ranks.peers import Peers
from zero.checkpoint.engine_state import RankState
from zero.checkpoint.rank_file import Part
from zero.checkpoint.save_job import RankSave
from zero.checkpoint.save_messages import SaveMessages
from zero.files.publication import Publication
from zero.files.reader import Checkpoint
from zero.files.storage import Storage

RANKS = 2
Contents = dict[str, bytes]
"""Every tensor's bytes, by key."""


def save(
    storage: Storage, path: Path, steps: int, keep_last: int | None = None, timeout: float = 5.0
) -> list[BaseException | None]:
    """Save the job as it is after `steps`; returns what each rank raised."""
    store = bounded(HashStore(), 60.0)
    errors: list[BaseException | None] = [None] * RANKS

    def rank(number: int) -> None:
        group = Group(number, RANKS, timeout, store, cast(Any, None))
        parts = [p for p in _parts(steps) if p[0] == number]
        job = RankSave(
            SaveMessages(group, "test", Peers()),
            storage,
            current(),
            Publication(storage, path, keep_last),
            RankState(parts=[part for _, part in parts]),
            _described(steps),
        )
        try:
            job.run()
        except BaseException as error:
            errors[number] = error

    threads = [threading.Thread(target=rank, args=(n,), name=f"rank {n}") for n in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def expected(steps: int) -> Contents:
    """What a checkpoint of that step holds."""
    whole: dict[str, list[Tensor]] = {}
    for _, part in sorted(_parts(steps), key=lambda item: (item[1].key, item[1].start)):
        whole.setdefault(part.key, []).append(part.values)
    return {key: torch.cat(values).view(torch.uint8).numpy().tobytes() for key, values in whole.items()}


def contents(path: Path, storage: Storage) -> tuple[int, Contents]:
    """Steps and everything in a checkpoint, read and checked."""
    with Checkpoint(path, storage) as checkpoint:
        found = {}
        for key, tensor in checkpoint.manifest.tensors.items():
            values = bytearray(tensor.numel * tensor.item_bytes)
            checkpoint.read(key, 0, memoryview(values))
            found[key] = bytes(values)
        return checkpoint.manifest.steps, found


def _parts(steps: int) -> list[tuple[int, Part]]:
    """(rank, part): a parameter cut in two, its optimizer state, a tensor of each rank's own."""
    generator = torch.Generator().manual_seed(steps)
    weight, moment = torch.randn(700, generator=generator), torch.randn(700, generator=generator)
    step = torch.full((1,), float(steps))
    return [
        (0, Part("model/w", (20, 35), weight[:300])),
        (1, Part("model/w", (20, 35), weight[300:], start=300)),
        (0, Part("optimizer/exp_avg/w", (20, 35), moment[:300])),
        (1, Part("optimizer/exp_avg/w", (20, 35), moment[300:], start=300)),
        (0, Part("optimizer/step/w", (), step)),
        *(
            (rank, Part(f"rank/{rank}/rng", (3,), torch.full((3,), steps, dtype=torch.uint8)))
            for rank in (0, 1)
        ),
    ]


def _described(steps: int) -> dict[str, Any]:
    parameter = SimpleNamespace(name="w", dtype="F32", trainable=True, unit="u", group=0, aliases=["v"])
    return {
        "zero": "0",
        "created": float(steps),
        "steps": steps,
        "world_size": RANKS,
        "stage": 3,
        "precision": "fp32",
        "loss_scale": None,
        "optimizer": {"kind": "test", "param_groups": [{"lr": 0.1}]},
        "parameters": [vars(parameter)],
        "buffers": [],
        "extra_state": {},
        "state": {"steps": steps},
    }
