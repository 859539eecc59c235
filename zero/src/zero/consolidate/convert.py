"""Converting the weights of any source into a checkpoint in zero's format, to initialise a job from.

It has no optimizer state. `engine.load_checkpoint(path, weights_only=True)` loads it, at any stage and number
of ranks, each rank reading only its part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from zero.consolidate.plan import OutputPlan, PlannedFile, choose
from zero.consolidate.run import OnProgress, Options, Written, publish
from zero.consolidate.workers import chunk_bytes, run
from zero.errors import CheckpointError
from zero.files.boundary import typed
from zero.files.manifest import CHECKSUM_BLOCK, ITEM_BYTES, MANIFEST, model_key
from zero.files.manifest_assembly import assemble
from zero.files.rank_layout import RankLayout, Stretch, block_sums
from zero.files.storage import DISK, File, write_whole
from zero.sources.source import Chunk, Source
from zero.version import __version__

NAME = "rank-00000.safetensors"


def convert(
    source: Source, out: str | Path, options: Options | None = None, progress: OnProgress = lambda *_: None
) -> Written:
    """Write the weights of `source` as the checkpoint `out`.

    It appears in one step, and errors are the same, as with consolidate(). options: format and max_shard_size
    have no meaning here.
    """
    options = options or Options(dtype="stored")
    with typed(source.path):
        chosen = choose(source.tensors, options.dtype, options.include, options.exclude)
        ordered = sorted(chosen, key=lambda t: -ITEM_BYTES[t.dtype])  # keeps every tensor aligned
        layout = RankLayout(Stretch(model_key(t.name), t.dtype, t.shape, t.numel) for t in ordered)
    offsets = {t.tensor: place for t, place in zip(ordered, layout.places, strict=True)}
    plan = OutputPlan((PlannedFile(NAME, layout.size, offsets, tuple(ordered), ((0, layout.header),)),), {})

    def complete(directory: Path) -> None:
        path = directory / NAME
        table = _checksums(path, layout, options)
        with closing(DISK.reopen(path)) as file:
            file.write(layout.checksums_at, [memoryview(table)])
            file.sync()
        report = {**layout.report(NAME, table), "values": {}, "rng": {}, "state": {}}
        DISK.remove(directory / MANIFEST)
        write_whole(DISK, directory / MANIFEST, assemble(_described(source, plan), [report]))

    return publish(source, plan, Path(out), options, progress, DISK, complete)


def _checksums(path: Path, layout: RankLayout, options: Options) -> bytes:
    """The table of the CRC-32 values of all blocks of all tensors, in the table's format."""
    limit = chunk_bytes(options.memory, options.workers)
    table = bytearray(layout.size - layout.checksums_at)
    opened = DISK.open(path, direct=True)

    def chunks() -> Iterator[Chunk]:
        block = 0
        for stretch, place in zip(layout.stretches, layout.places, strict=True):
            for first in range(0, stretch.nbytes, limit):
                nbytes = min(limit, stretch.nbytes - first)
                number = block + first // CHECKSUM_BLOCK
                yield Chunk(nbytes, partial(_sum, opened, place + first, nbytes, table, number))
            block += stretch.blocks

    with closing(opened):
        run(chunks(), options.workers, limit, lambda chunk, buffers: chunk.read(buffers.source))
    return bytes(table)


def _sum(file: File, offset: int, nbytes: int, table: bytearray, block: int, pages: memoryview) -> memoryview:
    """Read bytes from `offset` on, and enter their checksums in the table from block number `block` on."""
    values = file.read_around(offset, nbytes, pages)
    if values.nbytes < nbytes:
        raise CheckpointError(f"{file.path} is shorter than what was written")
    sums = block_sums(values)
    table[4 * block : 4 * block + len(sums)] = sums
    return values


def _described(source: Source, plan: OutputPlan) -> dict[str, Any]:
    """The manifest's members that do not describe files."""
    kinds = {chosen: source.tensors[chosen.tensor].kind for chosen in plan.files[0].tensors}
    return {
        "zero": __version__,
        "created": time.time(),
        "steps": 0,
        "world_size": 1,
        "stage": 0,
        "precision": "model",
        "loss_scale": None,
        "optimizer": {"kind": "none", "param_groups": []},
        "parameters": [
            {
                "name": chosen.name,
                "dtype": source.tensors[chosen.tensor].training_dtype,
                "trainable": kind == "parameter",
                "unit": "",
                "group": None,
                "aliases": chosen.aliases,
            }
            for chosen, kind in kinds.items()
            if kind != "buffer"
        ],
        "buffers": [chosen.name for chosen, kind in kinds.items() if kind == "buffer"],
        "left_out": [*source.missing, *plan.excluded(source.tensors)],
        "extra_state": {},
        "state": {},
    }
