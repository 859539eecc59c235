"""Checkpoints in zero's own format as a source. Every block that is read is checked."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from zero.errors import CheckpointError
from zero.files.boundary import typed
from zero.files.manifest import (
    CHECKSUM_BLOCK,
    Manifest,
    ParameterEntry,
    Slice,
    TensorEntry,
    blocks_of,
    model_key,
    state_key,
)
from zero.files.reader import Checkpoint, find
from zero.sources.assembled import assembled
from zero.sources.source import Chunk, Fragment, Source, TensorInfo, TensorKind


class ZeroSource(Source):
    """A checkpoint of zero.

    path: a checkpoint, or a directory of several, of which `latest` names one. optimizer: whether to include,
    among the tensors, the optimizer's state that has one value for each element.
    """

    format = "zero"

    def __init__(self, path: Path, optimizer: bool = False) -> None:
        with typed(path):
            self.path = find(path)
            self.checkpoint = Checkpoint(self.path, direct=True)
        try:
            with typed(self.path):
                self._describe(optimizer)
        except BaseException:
            self.checkpoint.close()
            raise

    def _describe(self, optimizer: bool) -> None:
        self.checkpoint.check_files()
        manifest = self.checkpoint.manifest
        found = dict(_infos(manifest, optimizer))
        self._keys, self.tensors = tuple(found), tuple(found.values())
        self.left_out = tuple(manifest.extra_state)
        self.missing = manifest.left_out
        self.identity = f"zero {self.path.absolute()} {self.checkpoint.digest:08x}"
        self.facts = {
            "steps": manifest.steps,
            "world size": manifest.world_size,
            "stage": manifest.stage,
            "precision": manifest.precision,
            "optimizer": manifest.optimizer.kind,
            "saved by": f"zero {manifest.zero}",
            "created": manifest.created,
            "files": len(manifest.files),
            "bytes": sum(file.bytes for file in manifest.files),
        }
        if divided := [parameter for parameter in manifest.parameters if parameter.blocks]:
            self.facts["divided"] = (
                f"{len(divided)} parameters, in up to {max(len(p.blocks) for p in divided)} blocks"
            )

    def chunks(self, wanted: Collection[int], limit: int) -> Iterator[Chunk]:
        manifest = self.checkpoint.manifest
        lone = {p.name: p.form for p in manifest.parameters if p.shape is not None and not p.blocks}
        for name in (self.tensors[index].name for index in wanted):
            if name in lone:
                raise CheckpointError(
                    f"{self.path} has only a part of parameter {name!r}, {lone[name]}: give zero.initialize "
                    "the whole job's mesh, and a checkpoint has all of it"
                )
        for index, key in enumerate(self._keys):
            if index in wanted:
                yield from self._of(index, key, limit)

    def everything(self, limit: int) -> Iterator[Chunk]:
        for key, entry in self.checkpoint.manifest.tensors.items():
            for piece in entry.slices:
                yield from self._slice(None, key, entry, piece, limit)

    def close(self) -> None:
        self.checkpoint.close()

    def _of(self, index: int, key: str, limit: int) -> Iterator[Chunk]:
        entry = self.checkpoint.tensor(key)
        if isinstance(entry, TensorEntry) and entry.stride is None:
            for piece in entry.slices:
                yield from self._slice(index, key, entry, piece, limit)
            return
        blocks = blocks_of(key, entry)
        yield from assembled(
            index, entry.shape, blocks, self.checkpoint.read, entry.item_bytes, limit, gap=CHECKSUM_BLOCK
        )

    def _slice(
        self, index: int | None, key: str, entry: TensorEntry, piece: Slice, limit: int
    ) -> Iterator[Chunk]:
        """A slice in chunks, cut at its blocks, so that no block is read twice."""
        item, block = entry.item_bytes, self.checkpoint.manifest.block_bytes
        size, step = piece.length * item, max(item, limit // block * block or limit // item * item)
        for first in range(0, size, step):
            count = min(step, size - first)
            start = piece.start + first // item
            pieces = () if index is None else (Fragment(index, start, count // item, 0),)
            yield Chunk(count, partial(self.checkpoint.read_around, key, start, count), pieces)


def _infos(manifest: Manifest, optimizer: bool) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors, with their keys in the manifest."""
    for parameter in manifest.parameters:
        key = model_key(parameter.name)
        entry = manifest.tensor(key)
        kind: TensorKind = "parameter" if parameter.trainable else "frozen"
        dtypes = entry.dtype, parameter.dtype
        packed = parameter.form is not None and parameter.shape is None
        yield key, TensorInfo(parameter.name, entry.shape, *dtypes, kind, parameter.aliases, packed)
        for state in elementwise_state(manifest, parameter) if optimizer else ():
            key = state_key(state, parameter.name)
            dtype = manifest.tensor(key).dtype
            yield key, TensorInfo(key, entry.shape, dtype, dtype, "state")
    for name in manifest.buffers:
        entry = manifest.tensors[model_key(name)]
        yield model_key(name), TensorInfo(name, entry.shape, entry.dtype, entry.dtype, "buffer")


def elementwise_state(manifest: Manifest, parameter: ParameterEntry) -> list[str]:
    """The keys of a parameter's optimizer state that has one value for each element."""
    shape = manifest.tensor(model_key(parameter.name)).shape
    return [
        key
        for key in parameter.state
        if key != "step" and manifest.tensor(state_key(key, parameter.name)).shape == shape
    ]
