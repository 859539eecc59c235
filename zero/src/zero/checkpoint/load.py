"""Loading a checkpoint into an engine of any world size, stage and device: each rank reads what it owns."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from zero.average import EMA, averages_in
from zero.checkpoint import random_state
from zero.checkpoint.engine_state import EngineParts
from zero.checkpoint.load_optimizer import OptimizerLoad
from zero.checkpoint.stored_names import StoredNames
from zero.errors import CheckpointError, StateError, UsageError, some
from zero.files.manifest import Manifest, average_key, model_key
from zero.files.names import Rename, match, raise_for, stored_in
from zero.files.reader import Checkpoint, find
from zero.files.storage import Storage
from zero.loading.tensor_reader import TensorReader
from zero.loading.together import all_or_none
from zero.loading.weights import fill_buffers, fill_slices, fill_units, targets
from zero.migration_hints import no_tuple
from zero.ranges import in_range
from zero.sharding.forms import descriptions
from zero.sharding.sharded_unit import refill
from zero.sharding.state_entries import entries_of, load_rest

_log = logging.getLogger("zero")
_SAVED_WITHOUT = "%s was saved without %d of the model's parameters and buffers, which keep their values: %s"


@dataclass(frozen=True)
class LoadOptions:
    """See Engine.load_checkpoint."""

    restore: Mapping[str, Any]
    strict: bool
    weights_only: bool
    rename: Rename | None


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint held besides the engine's own state.

    path: the checkpoint's directory. steps: optimizer steps taken when it was saved. world_size: how many
    ranks saved it. state: as given to save_checkpoint, with tensors on the host. rank_states: the rank_state
    of every rank that saved, by rank. left_out: the model's parameters and buffers that the checkpoint was
    saved without, which keep their values. nbytes: read by this rank.
    """

    path: Path
    steps: int
    world_size: int
    state: dict[str, Any]
    rank_states: tuple[dict[str, Any], ...]
    left_out: tuple[str, ...]
    nbytes: int = 0

    def __iter__(self) -> NoReturn:
        raise no_tuple("Loaded")


def load(
    engine: EngineParts,
    storage: Storage,
    path: Path,
    options: LoadOptions,
    before_change: Callable[[bool], None],
) -> Loaded:
    """Load a checkpoint. Collective.

    before_change: called after everything has been checked and before the first value changes, with whether
    the checkpoint has the whole model.
    """
    together = partial(all_or_none, engine.communicator, "the checkpoint", everywhere=True)
    names = engine.stored_names()
    elsewhere = names.elsewhere()
    found = together(lambda: os.path.relpath(find(path, storage), path) if engine.rank == 0 else None)[0]
    where = path / found  # relative, since the path may differ between machines
    if found.startswith(".."):  # a hidden sibling that a killed save has left in place of `path`
        where = Path(os.path.abspath(where))
    opened: list[Checkpoint] = []
    try:
        _check_same(together(lambda: [str(where), _open(engine, storage, where, opened)]))
        load = _Load(engine, opened[0], options, names, elsewhere)
        together(load.check)
        left_out = load.loaded.left_out
        before_change(not left_out)
        together(load.fill)
        load.spread()
        together(load.restore)
        if left_out and engine.rank == 0:
            _log.warning(_SAVED_WITHOUT, where, len(left_out), some(left_out))
        return replace(load.loaded, nbytes=opened[0].bytes_read)
    finally:
        for checkpoint in opened:
            checkpoint.close()


def _open(engine: EngineParts, storage: Storage, path: Path, opened: list[Checkpoint]) -> int:
    checkpoint = Checkpoint(path, storage)
    opened.append(checkpoint)
    if engine.rank == 0:
        checkpoint.check_files()
    return checkpoint.digest


def _check_same(seen: Sequence[tuple[str, int]]) -> None:
    """Raise unless all ranks have opened the same checkpoint. seen: path and digest, by rank."""
    for rank, (path, digest) in enumerate(seen):
        if digest != seen[0][1]:
            raise CheckpointError(
                f"the ranks see different checkpoints: rank 0 in {seen[0][0]}, rank {rank} in {path}. Either "
                "it was replaced during the load, or the ranks use different file systems or were given "
                "different paths"
            )


@dataclass(eq=False, repr=False)
class _Load:
    """One load. Its public methods are called in the order in which they stand. loaded: from check() on."""

    loaded: Loaded = field(init=False)
    engine: EngineParts
    checkpoint: Checkpoint
    options: LoadOptions
    names: InitVar[StoredNames]
    elsewhere: frozenset[str]

    def __post_init__(self, names: StoredNames) -> None:
        self._manifest: Manifest = self.checkpoint.manifest
        self._reader = TensorReader(self.checkpoint)
        self._sources: dict[str, str] = {}
        self._optimizer: OptimizerLoad | None = None  # None: it stays as it is
        self._random_states: dict[str, Any] = {}
        self._mine = {names.stored(name): name for name in entries_of(self.engine.module).names}
        self._extra_state = {names.stored(name) for name in entries_of(self.engine.module).rest}
        self._stored = names.stored
        self._extra_values: dict[str, Any] = {}

    @in_range("load", "check")
    def check(self) -> None:
        """Raise StateError or UsageError if anything does not fit. Changes nothing."""
        options, left_out, wanted = self.options, self._manifest.left_out, targets(self.engine.module)
        sources = match(
            stored_in(self._manifest),
            [
                replace(each, name=self._stored(each.name), aliases=tuple(map(self._stored, each.aliases)))
                for each in wanted
            ],
            options.rename,
            options.strict,
            lambda one, other: self._reader.same(model_key(one), model_key(other)),
            left_out,
            self._of_this_rank,
        )
        self._sources = {self._mine[name]: source for name, source in sources.items()}
        self._check_forms()
        if options.strict:
            mine, saved = self._extra_state, self._manifest.extra_state.keys() - self.elsewhere
            missing = mine - saved - set(left_out)
            raise_for({"extra state missing": [*missing], "extra state unexpected": [*saved - mine]})
        if not options.weights_only:
            self._optimizer = OptimizerLoad(self.engine, self._manifest, self._reader, self._sources)
            self._optimizer.check(options.strict)
        left = tuple(target.name for target in wanted if target.name not in self._sources)
        self._decode(left if left_out else ())
        self._check_restore(options.restore)

    def _check_forms(self) -> None:
        """Raise StateError for packed values that the model's parameters would take for others."""
        saved = {n: e.form for e in self._manifest.parameters for n in (e.name, *e.aliases)}
        entries, forms = entries_of(self.engine.module), descriptions(self.engine.module)
        for parameter, (name, *_) in entries.parameters.items():
            form = saved.get(self._sources.get(name, ""))
            if form is not None and form != forms.get(parameter):
                raise StateError(
                    f"parameter {name!r} was saved as {form} and is now "
                    f"{forms.get(parameter, 'plain values')}: build the model as it was when it was saved"
                )

    def _of_this_rank(self, name: str) -> str | None:
        """A name in the checkpoint, or one of the model that the program has renamed it to, as this rank
        stores it; None for what only other ranks have."""
        if name in self.elsewhere:
            return None
        return self._stored(name) if self.options.rename is not None else name

    def _decode(self, left_out: tuple[str, ...]) -> None:
        """Read all user values, and the random state of this rank if it is to be restored, and check that."""
        manifest, decode = self._manifest, self._reader.decode
        state, rank_states = decode(manifest.state), tuple(decode(rank.state) for rank in manifest.ranks)
        path, ranks = self.checkpoint.path, manifest.world_size
        self.loaded = Loaded(path, manifest.steps, ranks, state, rank_states, left_out)
        self._extra_values = {
            self._mine[name]: decode(manifest.extra_state[name])
            for name in self._extra_state & manifest.extra_state.keys()
        }
        if self._optimizer is not None and self.engine.rank < manifest.world_size:
            self._random_states = decode(manifest.ranks[self.engine.rank].rng) or {}
            if self._random_states:
                random_state.check(self._random_states)

    def _check_restore(self, restore: Mapping[str, Any]) -> None:
        state = self.loaded.state
        lost = [name for name in restore if name not in state]
        if lost:
            raise StateError(f"restore: the checkpoint's state has no {lost}; it has {list(state)}")
        for key, average in averages_in(restore).items():
            average.check_belongs(self.engine.units)
            self._check_average(key, self._average_keys(key, average))
        for name, value in restore.items():
            if not hasattr(value, "load_state_dict"):
                raise UsageError(
                    f"restore[{name!r}] is a {type(value).__name__}, which has no load_state_dict(): remove "
                    f"it, and read the value from what load_checkpoint returns, .state[{name!r}]"
                )

    def _average_keys(self, key: str, average: EMA) -> dict[str, str]:
        """The keys of the tensors with an average, by the names of parameters that the checkpoint has."""
        mine = (s for group in average.slices for s in group.layout.specs if s.numel)
        return {s.name: average_key(key, self._sources[s.name]) for s in mine if s.name in self._sources}

    def _check_average(self, key: str, keys: Mapping[str, str]) -> None:
        """Raise StateError unless the checkpoint has this average of every parameter."""
        manifest = self._manifest
        known = manifest.tensors.keys() | manifest.wholes.keys()
        for name, found in keys.items():
            values = manifest.tensor(model_key(self._sources[name]))
            if found not in known or manifest.tensor(found).shape != values.shape:
                raise StateError(
                    f"restore[{key!r}]: the checkpoint has no average of {name!r}: save it on every rank, "
                    f"as in save_checkpoint(path, {{{key!r}: ema}}), or leave it out here"
                )

    @in_range("load", "fill")
    def fill(self) -> None:
        """Fill this rank's shards, masters, optimizer state and generators, and the module's buffers."""
        keys = {name: model_key(source) for name, source in self._sources.items()}
        fill_units(self.engine.units, self._reader, keys)
        fill_buffers(self.engine.module, self._reader, keys)
        load_rest(self.engine.module, self._extra_values)
        for key, average in averages_in(self.options.restore).items():
            fill_slices(average.slices, self._reader, self._average_keys(key, average))
        if self._optimizer is not None:
            self._optimizer.fill()
        if self._random_states:
            random_state.restore(self.engine.accelerator, self._random_states)

    @in_range("load", "spread")
    def spread(self) -> None:
        """Refresh the resident units' whole parameters. Collective.

        While the state is off the device nothing is done: they are gathered when it comes back.
        """
        if not self.engine.state_offload.away:
            refill(self.engine.units, frozen=True)

    def restore(self) -> None:
        """Restore the loss scale and the caller's objects."""
        scale, saved = self.engine.loss_scale, self._manifest.loss_scale
        if scale is not None and saved is not None and not self.options.weights_only:
            scale.restore(saved.scale, saved.good_steps, saved.skipped_steps)
        for name, value in self.options.restore.items():
            value.load_state_dict(self.loaded.state[name])
