"""Weights of any source as a checkpoint of zero's, to initialise a job from.

It has no optimizer state: `engine.load_checkpoint(path, weights_only=True)` loads it, at any stage and number
of ranks, each rank reading its part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import zero
from zero.checkpoint.assembly import assemble
from zero.checkpoint.header import header_of
from zero.checkpoint.manifest import BLOCK, CHECKSUMS, MANIFEST, model_key
from zero.checkpoint.storage import File, write_whole
from zero.consolidate.files import WEIGHTS, WeightStorage
from zero.consolidate.plan import Chosen, Plan, PlannedFile, choose
from zero.consolidate.run import Options, Progress, Result, publish
from zero.consolidate.workers import Buffers, chunk_bytes, run
from zero.errors import CheckpointError
from zero.sources.source import Chunk, Source

NAME = "rank-00000.safetensors"


def convert(
    source: Source,
    out: str | Path,
    options: Options | None = None,
    progress: Progress = lambda *_: None,
    storage: WeightStorage = WEIGHTS,
) -> Result:
    """Write the checkpoint `out`; it appears in one step, as consolidate() does it, and raises the same.

    options: format and max_shard_size have no meaning here.
    """
    options = options or Options(dtype="stored")
    chosen = choose(source.tensors, options.dtype, options.include, options.exclude)
    file, checksums_at = _plan(chosen)

    def complete(directory: Path) -> None:
        path = directory / NAME
        table = _checksums(storage, path, file, options)
        _append(storage, path, checksums_at, table)
        storage.remove(directory / MANIFEST)
        write_whole(storage, directory / MANIFEST, _manifest(source, file, checksums_at, table))

    return publish(source, Plan((file,), {}), Path(out), options, progress, storage, complete)


def _plan(tensors: Sequence[Chosen]) -> tuple[PlannedFile, int]:
    """The rank file, and where in it the table of checksums begins."""
    ordered = sorted(tensors, key=lambda t: -(t.nbytes // max(1, t.numel)))
    described: dict[str, Any] = {"__metadata__": {"format": "pt", "whole": "see manifest.json"}}
    places, end = {}, 0
    for tensor in ordered:
        places[tensor.tensor] = end
        described[model_key(tensor.name)] = {
            "dtype": tensor.dtype,
            "shape": [tensor.numel],
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    table = 4 * sum(_blocks(tensor) for tensor in ordered)
    described[CHECKSUMS] = {"dtype": "U8", "shape": [table // 4, 4], "data_offsets": [end, end + table]}
    header = header_of(described)
    begin = len(header)
    offsets = {tensor: begin + place for tensor, place in places.items()}
    return PlannedFile(NAME, begin + end + table, offsets, tuple(ordered), ((0, header),)), begin + end


def _blocks(tensor: Chosen) -> int:
    return -(-tensor.nbytes // BLOCK)


def _checksums(storage: WeightStorage, path: Path, file: PlannedFile, options: Options) -> bytes:
    """The CRC-32 of every block of every tensor, as the table has them."""
    limit = chunk_bytes(options.memory, options.workers)
    table = bytearray(4 * sum(_blocks(tensor) for tensor in file.tensors))
    opened = storage.open(path, direct=True)

    def chunks() -> Iterator[Chunk]:
        block = 0
        for tensor in file.tensors:
            for first in range(0, tensor.nbytes, limit):
                offset = file.offsets[tensor.tensor] + first
                nbytes = min(limit, tensor.nbytes - first)
                yield Chunk(nbytes, partial(_sum, opened, offset, nbytes, table, block + first // BLOCK))
            block += _blocks(tensor)

    def handle(chunk: Chunk, buffers: Buffers) -> None:
        buffers.read(chunk)

    try:
        run(chunks(), options.workers, limit, handle)
    finally:
        opened.close()
    return bytes(table)


def _sum(file: File, offset: int, nbytes: int, table: bytearray, block: int, pages: memoryview) -> memoryview:
    """Read bytes from `offset` on, and note their checksums from block number `block` on."""
    values = file.read_around(offset, nbytes, pages)
    if values.nbytes < nbytes:
        raise CheckpointError(f"{file.path} is shorter than it was written")
    for number, first in enumerate(range(0, nbytes, BLOCK), start=block):
        table[4 * number : 4 * number + 4] = crc32(values[first : first + BLOCK]).to_bytes(4, "little")
    return values


def _append(storage: WeightStorage, path: Path, offset: int, data: bytes) -> None:
    file = storage.reopen(path)
    try:
        file.write(offset, [memoryview(data)])
        file.sync()
    finally:
        file.close()


def _manifest(source: Source, file: PlannedFile, checksums_at: int, table: bytes) -> bytes:
    """Put together and read back, as a save does it: of one rank, which had no optimizer."""
    return assemble(_described(source, file), [_report(file, checksums_at, table)])


def _report(file: PlannedFile, checksums_at: int, table: bytes) -> dict[str, Any]:
    """What a rank that saves says of its file."""
    tensors, block = {}, 0
    for chosen in file.tensors:
        piece = [0, chosen.numel, file.offsets[chosen.tensor], block] if chosen.numel else None
        tensors[model_key(chosen.name)] = [chosen.dtype, chosen.shape, None, piece]
        block += _blocks(chosen)
    described = {
        "name": NAME,
        "bytes": file.nbytes,
        "header": crc32(file.fixed[0][1]),
        "checksums_at": checksums_at,
        "checksums": crc32(table),
    }
    return {"file": described, "tensors": tensors, "values": {}, "rng": {}, "state": {}}


def _described(source: Source, file: PlannedFile) -> dict[str, Any]:
    """The manifest's members that are not about files."""
    kinds = {chosen: source.tensors[chosen.tensor].kind for chosen in file.tensors}
    return {
        "zero": zero.__version__,
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
        "extra_state": {},
        "state": {},
    }
