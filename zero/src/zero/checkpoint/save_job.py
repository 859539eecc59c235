"""One save: every rank writes its file, rank 0 publishes, all learn the outcome. Knows nothing of engines.

It may have a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelz import Accelerator
from zero.checkpoint.engine_state import RankState
from zero.checkpoint.rank_file import write_rank_file
from zero.checkpoint.save_messages import SaveMessages, program_failed
from zero.checkpoint.save_start import LAST, PART, take_leave
from zero.errors import CheckpointError, CommunicationError
from zero.files.manifest_assembly import assemble
from zero.files.publication import Publication
from zero.files.storage import Storage
from zero.loading.together import Problem, error_of, problem_of
from zero.observe.observation import timed
from zero.ranges import in_range

_log = logging.getLogger("zero")
START_SECONDS = 5.0
"""How long a thread may take to begin. Where Ctrl-C interrupts its start, it never does."""


@dataclass
class RankSave:
    """One rank's part of a save.

    described: on rank 0, the manifest's members that are known before the save begins. threads: whether
    writing may start some. failure: the cause, on this rank, of the error that is raised. shared: rank 0
    raises the same error, which is not this rank's doing. seconds: by phase. done(): called with this rank's
    bytes once it is complete.
    """

    messages: SaveMessages
    storage: Storage
    accelerator: Accelerator
    publication: Publication
    mine: RankState = field(default_factory=RankState)
    described: dict[str, Any] = field(default_factory=dict)
    threads: bool = True
    failure: Exception | None = None
    shared: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    done: Callable[[int], None] = lambda nbytes: None

    def run(self) -> None:
        """Write this rank's file and publish the checkpoint. Raises on every rank or on none."""
        try:
            problem = self._run()
        finally:
            self.publication.close()
        if problem:
            raise error_of(problem) from self.failure
        self.done(sum(part.nbytes for part in self.mine.parts))

    def _run(self) -> Problem:
        rank, messages = self.messages.rank, self.messages
        try:
            with timed(self.seconds, "write"):
                report = self._write(self._begin())
        except Exception as error:
            self.failure = error
            report = {"problem": problem_of(error, PART.format(rank))}
        messages.publish("file", report)
        if rank:
            outcome = self._outcome(report.get("problem", []))
            messages.publish("leave", None)
            return outcome
        with timed(self.seconds, "publish"):
            outcome = self._publish()
        self._tell(outcome)
        if outcome[:1] != [CommunicationError.__name__]:  # otherwise nobody may be there
            take_leave(messages)
        return outcome

    def _begin(self) -> Path:
        """Have rank 0 make the directory, and return it once it is there."""
        if self.messages.rank:
            problem, there = self.messages.collect("directory", [0])[0]
            if problem:
                self.shared = True
                raise error_of(problem)
            self._check_same(there)
        else:
            self._make_directory()
        return self.publication.staging

    def _make_directory(self) -> None:
        """Or tell the others why there is none: one of that name may be another save's."""
        problem: Problem = []
        try:
            self.publication.begin()
        except Exception as error:
            problem = problem_of(error, f"{self.publication.staging} could not be created")
        self.messages.publish("directory", [problem, str(self.publication.staging)])
        if problem:
            raise error_of(problem)

    def _check_same(self, there: str) -> None:
        """Raise unless this rank sees the directory. there: rank 0's path of it, which may differ."""
        here, rank = self.publication.staging, self.messages.rank
        if not self.storage.is_directory(here):
            raise CheckpointError(
                f"rank 0 created {there}, but rank {rank} does not see {here}: every rank must pass the same "
                "path, on a file system that all ranks share"
            )

    @in_range("save", "write")
    def _write(self, staging: Path) -> dict[str, Any]:
        path = staging / f"rank-{self.messages.rank:05d}.safetensors"
        report = write_rank_file(self.storage, self.accelerator, path, self.mine.parts, self.threads)
        return report | {name: value for name, value in vars(self.mine).items() if name != "parts"}

    def _outcome(self, mine: Problem) -> Problem:
        """Rank 0's word, if it can be had and this rank's program goes on. mine: this rank's problem."""
        if mine[:1] == [CommunicationError.__name__]:
            return mine  # rank 0 is gone
        try:
            told: Problem = self.messages.collect("outcome", [0], LAST, give_up=program_failed)[0]
            self.shared = self.shared or not mine
            return told
        except CommunicationError as error:
            if not program_failed():
                raise CommunicationError(
                    f"{error}. This rank does not know whether the checkpoint {self.publication.path} was "
                    "published: if it is there, it is complete"
                ) from error
        if not mine:
            _log.warning(
                "rank %d has written its part of %s and ends, as its program has failed: the other ranks "
                "complete the checkpoint if they can",
                *(self.messages.rank, self.publication.staging),
            )
        return mine

    def _tell(self, outcome: Problem) -> None:
        """Tell the others, on rank 0. A checkpoint that is published stays so if they cannot be told."""
        try:
            self.messages.publish("outcome", outcome)
        except CommunicationError as error:
            if outcome:
                raise
            _log.warning("%s is saved, but %s", self.publication.path, error)

    @in_range("save", "publish")
    def _publish(self) -> Problem:
        """Publish the checkpoint once every rank has written its file. On rank 0."""
        try:
            reports = self.messages.collect("file", self.messages.ranks)
            problem = next((r["problem"] for _, r in sorted(reports.items()) if "problem" in r), None)
            if problem:
                raise error_of(problem)
            self._check_visible(reports)
            self.publication.commit(assemble(self.described, [reports[r] for r in self.messages.ranks]))
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
        """Raise unless rank 0 sees every rank's file in full, written to the same directory."""
        for rank, report in reports.items():
            entry = report["file"]
            try:
                with closing(self.storage.open(self.publication.staging / entry["name"])) as file:
                    size = file.size()
            except FileNotFoundError:
                size = 0
            if size != entry["bytes"]:
                raise CheckpointError(
                    f"rank 0 sees {size} of the {entry['bytes']} bytes that rank {rank} wrote: the "
                    "checkpoint must be on a file system that all ranks share"
                )


class BackgroundSave:
    """One job in the background. path: of the checkpoint, for messages."""

    def __init__(self, job: RankSave, path: Path) -> None:
        self._job = job
        self._path = path
        self._failure: BaseException | None = None
        self._begun = threading.Event()
        self._claim = threading.Lock()  # whose it is: the thread has begun, or is waited for no longer
        self._thread = threading.Thread(target=self._run, name=f"saving {path}")

    def start(self) -> None:
        self._thread.start()

    def outcome(self) -> BaseException | None:
        """Wait until the save is over, and return its error, if any. May be interrupted and called again."""
        if not self._begun.wait(START_SECONDS) and self._claim.acquire(blocking=False):
            return CheckpointError(
                f"the save of {self._path} in the background was interrupted before it began: call "
                "save_checkpoint again on every rank"
            )
        self._begun.wait()
        self._thread.join()
        return self._failure

    def _run(self) -> None:
        """The thread's body."""
        if not self._claim.acquire(blocking=False):
            return
        self._begun.set()
        try:
            self._job.run()
        except BaseException as error:
            self._failure = error
            if not self._job.shared:  # otherwise rank 0 says so
                _log.error("the checkpoint %s could not be saved: %s", self._path, error)
