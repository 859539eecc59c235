"""Saving: every rank writes its file, rank 0 publishes, all learn the outcome. At once or in a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from accelz.accelerator import Accelerator
from zero.checkpoint import user_state
from zero.checkpoint.engine_state import EngineParts, RankState, collect, describe
from zero.checkpoint.exchange import Exchange
from zero.checkpoint.manifest import BLOCK, Manifest, seal, unescape, unseal
from zero.checkpoint.problems import Problem, error_of, problem_of
from zero.checkpoint.publication import Publication
from zero.checkpoint.rank_file import copy_to_host, write_rank_file
from zero.checkpoint.storage import Storage
from zero.errors import CheckpointError, CommunicationError

_log = logging.getLogger("zero")
_LAST = 3.0  # the outcome takes longer: rank 0 itself may wait for a rank that is gone


@dataclass
class Job:
    """One rank's part of a save. described: the manifest's members that rank 0 knows before it begins.

    failure: what went wrong on this rank already; the others have to be told.
    """

    exchange: Exchange
    storage: Storage
    accelerator: Accelerator
    publication: Publication
    mine: RankState = field(default_factory=RankState)
    described: dict[str, Any] = field(default_factory=dict)
    failure: Exception | None = None

    def run(self) -> None:
        """Write and publish. Raises on every rank or on none."""
        try:
            problem = self._run()
        finally:
            self.publication.close()
        if problem:
            raise error_of(problem) from self.failure

    def _run(self) -> Problem:
        rank, exchange = self.exchange.rank, self.exchange
        try:
            report = self._write(self._begin())
        except Exception as error:
            self.failure = error
            report = {"problem": problem_of(error, f"rank {rank} could not save its part of the checkpoint")}
        exchange.publish("file", report)
        if rank:
            outcome: Problem = exchange.collect("outcome", [0], patience=_LAST)[0]
            exchange.publish("leave", None)
            return outcome
        outcome = self._publish()
        exchange.publish("outcome", outcome)
        if outcome[:1] != [CommunicationError.__name__]:  # otherwise nobody may be there
            self._take_leave()
        return outcome

    def _begin(self) -> Path:
        """Rank 0 makes the directory; all go on when it is there."""
        if self.exchange.rank:
            problem = self.exchange.collect("directory", [0])[0]
            if problem:
                raise error_of(problem)
        else:
            self._make_directory()
        if self.failure is not None:
            raise self.failure  # not earlier: the others are waiting for the directory
        return self.publication.staging

    def _make_directory(self) -> None:
        problem: Problem = []
        try:
            if self.failure is None:
                self.publication.begin()
        except Exception as error:
            problem = problem_of(error, f"{self.publication.staging} could not be made")
        self.exchange.publish("directory", problem)
        if problem:
            raise error_of(problem)

    def _write(self, staging: Path) -> dict[str, Any]:
        path = staging / f"rank-{self.exchange.rank:05d}.safetensors"
        report = write_rank_file(self.storage, self.accelerator, path, self.mine.parts)
        return report | {"values": self.mine.values, "rng": self.mine.rng, "state": self.mine.state}

    def _publish(self) -> Problem:
        """Rank 0, once every rank has written its file."""
        try:
            reports = self.exchange.collect("file", self.exchange.ranks)
            problem = next((r["problem"] for _, r in sorted(reports.items()) if "problem" in r), None)
            if problem:
                raise error_of(problem)
            self._check_visible(reports)
            self.publication.commit(_manifest(self.described, [reports[r] for r in self.exchange.ranks]))
        except Exception as error:
            return self._abandon(problem_of(error, "the checkpoint could not be published"))
        return []

    def _abandon(self, problem: Problem) -> Problem:
        try:
            self.publication.abandon()
        except OSError as error:
            problem[1] += f" (what was written so far could not be removed: {error})"
        return problem

    def _check_visible(self, reports: Mapping[int, Any]) -> None:
        """Ranks on other machines must have written to the same directory."""
        for rank, report in reports.items():
            entry = report["file"]
            try:
                file = self.storage.open(self.publication.staging / entry["name"])
                size = file.size()
                file.close()
            except FileNotFoundError:
                size = 0
            if size != entry["bytes"]:
                raise CheckpointError(
                    f"of the {entry['bytes']} bytes that rank {rank} wrote rank 0 sees {size}: the "
                    "checkpoint must be on a file system that all ranks share"
                )

    def _take_leave(self) -> None:
        """Rank 0 may hold the store: it stays until everybody has read the outcome."""
        others = self.exchange.ranks[1:]
        try:
            self.exchange.collect("leave", others)
            self.exchange.forget("leave", others)
            self.exchange.forget("file", self.exchange.ranks)
            self.exchange.forget("directory", [0])
            self.exchange.forget("outcome", [0])
        except CommunicationError as error:
            _log.warning("the checkpoint's outcome is settled, but %s", error)


class Saver:
    """Prepares saves of one engine and runs them, one at a time."""

    def __init__(self, engine: EngineParts, key: str) -> None:
        self._engine = engine
        self._key = key
        self._count = 0
        self._arena: Tensor | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(
        self,
        storage: Storage,
        path: Path,
        steps: int,
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        keep_last: int | None,
        async_: bool,
    ) -> None:
        """Collective. See Engine.save_checkpoint."""
        self.wait()
        self._count += 1
        job = Job(
            Exchange(self._engine.communicator.group, f"{self._key}/save{self._count}"),
            storage,
            self._engine.accelerator,
            Publication(storage, path, keep_last),
        )
        try:
            self._prepare(job, steps, state, rank_state, async_)
        except Exception as error:
            job.failure = error
        if async_:
            self._thread = threading.Thread(target=self._run, args=(job, path), name=f"saving {path}")
            self._thread.start()
        else:
            self._arena = None
            job.run()

    def wait(self) -> None:
        """Until the save in the background is over; raises its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _prepare(
        self, job: Job, steps: int, state: Mapping[str, Any], rank_state: Mapping[str, Any], copy: bool
    ) -> None:
        """Everything that looks at the engine: in the background it changes meanwhile."""
        job.mine = collect(self._engine, _plain(rank_state))
        if job.exchange.rank == 0:
            job.described = {
                "zero": zero_version(),
                "created": time.time(),
                "steps": steps,
                **describe(self._engine, job.mine.parts),
                "state": user_state.encode(_plain(state), "state", job.mine.parts, "state"),
            }
        if copy:
            job.mine.parts, self._arena = copy_to_host(self._engine.accelerator, job.mine.parts, self._arena)

    def _run(self, job: Job, path: Path) -> None:
        try:
            job.run()
        except BaseException as error:
            self._failure = error
            _log.error("the checkpoint %s could not be saved: %s", path, error)


def zero_version() -> str:
    """This package's version."""
    import zero

    return zero.__version__


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Objects that have a state dict, such as schedulers, as that."""
    return {
        name: value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        for name, value in state.items()
    }


def _manifest(described: Mapping[str, Any], reports: list[dict[str, Any]]) -> bytes:
    """Put together and read back: what could not be loaded is not published."""
    tensors: dict[str, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    for number, report in enumerate(reports):
        for key, (dtype, shape, stride, piece) in report["tensors"].items():
            entry = tensors.setdefault(key, {"dtype": dtype, "shape": shape, "stride": stride, "slices": []})
            if piece is not None:
                entry["slices"].append([number, *piece])
        for name, entries in report["values"].items():
            values.setdefault(name, {}).update(entries)
    for entry in tensors.values():
        entry["slices"].sort(key=lambda piece: piece[1])
    parameters = _with_state(described["parameters"], tensors, values)
    members = {
        **described,
        "block_bytes": BLOCK,
        "parameters": parameters,
        "ranks": [{"rng": r["rng"], "state": r["state"]} for r in reports],
        "files": [r["file"] for r in reports],
        "tensors": tensors,
    }
    data = seal("zero-checkpoint", members)
    try:
        Manifest.model_validate_json(unseal("zero-checkpoint", data))
    except ValueError as error:
        raise CheckpointError(f"the state of this job makes no valid checkpoint: {error}") from error
    return data


def _with_state(
    parameters: list[dict[str, Any]], tensors: Mapping[str, Any], values: Mapping[str, Any]
) -> list[dict[str, Any]]:
    keys: dict[str, list[str]] = {}
    for key in tensors:
        kind, _, rest = key.partition("/")
        if kind == "optimizer":
            state, _, name = rest.partition("/")
            keys.setdefault(name, []).append(unescape(state))
    return [
        {**p, "state": sorted(keys.get(p["name"], [])), "values": values.get(p["name"], {})}
        for p in parameters
    ]
