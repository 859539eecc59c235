"""Weights of any source as a checkpoint of zero's, to initialise a job from.

It has no optimizer state: `engine.load_checkpoint(path, weights_only=True)` loads it, at any stage and number
of ranks, each rank reading its part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from zero.checkpoint.manifest import BLOCK, MANIFEST, Manifest, model_key, seal, unseal
from zero.checkpoint.rank_file import CHECKSUMS
from zero.checkpoint.storage import PAGE, File, write_whole
from zero.consolidate.files import WEIGHTS, WeightStorage
from zero.consolidate.plan import Chosen, Plan, PlannedFile, choose
from zero.consolidate.run import Options, Progress, Result, publish
from zero.consolidate.source import Chunk, Source
from zero.consolidate.workers import Buffers, chunk_bytes, run
from zero.errors import CheckpointError

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
    text = json.dumps(described, separators=(",", ":")).encode()
    data_at = -(-(8 + len(text)) // PAGE) * PAGE
    header = (data_at - 8).to_bytes(8, "little") + text.ljust(data_at - 8)
    offsets = {tensor: data_at + place for tensor, place in places.items()}
    return PlannedFile(NAME, data_at + end + table, offsets, tuple(ordered), ((0, header),)), data_at + end


def _blocks(tensor: Chosen) -> int:
    return -(-tensor.nbytes // BLOCK)


def _checksums(storage: WeightStorage, path: Path, file: PlannedFile, options: Options) -> bytes:
    """The CRC-32 of every block of every tensor, as the table has them."""
    limit = chunk_bytes(options.memory, options.workers)
    table = bytearray(4 * sum(_blocks(tensor) for tensor in file.tensors))
    opened = storage.open(path)

    def chunks() -> Iterator[Chunk]:
        block = 0
        for tensor in file.tensors:
            for first in range(0, tensor.nbytes, limit):
                offset = file.offsets[tensor.tensor] + first
                read = partial(_sum, opened, offset, table, block + first // BLOCK)
                yield Chunk(min(limit, tensor.nbytes - first), read)
            block += _blocks(tensor)

    def handle(chunk: Chunk, buffers: Buffers) -> None:
        buffers.read(chunk)

    try:
        run(chunks(), options.workers, limit, handle)
    finally:
        opened.close()
    return bytes(table)


def _sum(file: File, offset: int, table: bytearray, block: int, into: memoryview) -> None:
    """Read blocks from `offset` on, and note their checksums from number `block` on."""
    if file.read(offset, into) < into.nbytes:
        raise CheckpointError(f"{file.path} is shorter than it was written")
    for number, first in enumerate(range(0, into.nbytes, BLOCK), start=block):
        table[4 * number : 4 * number + 4] = crc32(into[first : first + BLOCK]).to_bytes(4, "little")


def _append(storage: WeightStorage, path: Path, offset: int, data: bytes) -> None:
    file = storage.reopen(path)
    try:
        file.write(offset, [memoryview(data)])
        file.sync()
    finally:
        file.close()


def _manifest(source: Source, file: PlannedFile, checksums_at: int, table: bytes) -> bytes:
    """Put together and read back, as a save does it."""
    import zero

    tensors, parameters, buffers, block = {}, [], [], 0
    for chosen in file.tensors:
        info = source.tensors[chosen.tensor]
        place = [0, 0, chosen.numel, file.offsets[chosen.tensor], block]
        slices = [place] if chosen.numel else []
        block += _blocks(chosen)
        entry = {"dtype": chosen.dtype, "shape": chosen.shape, "stride": None, "slices": slices}
        tensors[model_key(chosen.name)] = entry
        if info.kind == "buffer":
            buffers.append(chosen.name)
        else:
            parameters.append(
                {
                    "name": chosen.name,
                    "dtype": info.training_dtype,
                    "trainable": info.kind == "parameter",
                    "unit": "",
                    "group": None,
                    "aliases": chosen.aliases,
                }
            )
    header = file.fixed[0][1]
    members = {
        "zero": zero.__version__,
        "created": time.time(),
        "steps": 0,
        "world_size": 1,
        "stage": 0,
        "precision": "model",
        "block_bytes": BLOCK,
        "loss_scale": None,
        "optimizer": {"kind": "none", "param_groups": []},
        "parameters": parameters,
        "buffers": buffers,
        "extra_state": {},
        "state": {},
        "ranks": [{"rng": {}, "state": {}}],
        "files": [
            {
                "name": NAME,
                "bytes": file.nbytes,
                "header": crc32(header),
                "checksums_at": checksums_at,
                "checksums": crc32(table),
            }
        ],
        "tensors": tensors,
    }
    data = seal("zero-checkpoint", members)
    Manifest.model_validate_json(unseal("zero-checkpoint", data))
    return data
