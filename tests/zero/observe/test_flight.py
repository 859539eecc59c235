"""Flight recorders: what they write of a job that hangs, and what is said about it."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist

import zero
from accelz.conformance.cluster import Context
from tests.zero.helpers.commands import run
from tests.zero.helpers.failing import TIMEOUT, Ranks
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.paths import decaying, fresh, straight
from tests.zero.helpers.waiting import wait_until
from zero.communication.communicator import NamedHandle
from zero.communication.failures import Issued
from zero.observe.flight_file import Collective, Flight, read
from zero.observe.flight_recorder import FlightRecorder
from zero.observe.hang import explain, table

GATHER = "all_gather of unit 'blocks.3' (64 x float32)"


def copy_when_all_are_there(folder: Path, to: Path) -> None:
    wait_until(lambda: len(list(folder.glob("*.json"))) == 3)
    shutil.copytree(folder, to)


def slow_loader(folder: Path) -> None:
    """What rank 1 does while the others wait for it: until they have given up."""
    wait_until((folder / "given-up").exists)


def hanging_body(context: Context, folder: str) -> str:
    """Rank 0 gets a signal while it waits; then the wait fails."""
    model, path = fresh(), Path(folder)
    engine = zero.initialize(model, decaying(model), zero.Config(timeout=1.5 * TIMEOUT))
    train_on(engine, straight(model, 0, context.rank))
    alone = [dist.new_group([rank]) for rank in range(context.size)][context.rank]
    own = fresh()
    first = zero.initialize(own, decaying(own), zero.Config(timeout=20), process_group=alone)
    first.record_flight(path)  # the files' numbers are those of all ranks that were started
    engine.record_flight(path)
    with pytest.raises(zero.UsageError, match="a flight recorder already"):
        engine.record_flight(path / "other")
    engine._communicator.barrier("before the hang")
    if context.rank == 1:
        slow_loader(path)
        return ""
    if context.rank == 0:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        copies = threading.Thread(target=copy_when_all_are_there, args=(path, path.with_name("signalled")))
        copies.start()
    try:
        train_on(engine, straight(model, 1, context.rank))
    except zero.CommunicationError as error:
        if context.rank == 0:
            copies.join()
            (path / "given-up").touch()
        return str(error)
    return ""


def test_a_hang_is_explained_in_one_sentence(disposable: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "flights"
    told = disposable(3).run(hanging_body, limit=60, folder=str(folder))
    assert all("did not answer" in told[rank] for rank in (0, 2))
    for where in (tmp_path / "signalled", folder):
        flights = read(where)
        assert [flight.rank for flight in flights] == [0, 1, 2]
        sentence = run("explain-hang", where).stdout.splitlines()[0]
        assert sentence.startswith("Rank 1 has not come to where rank")
        assert "of unit" in sentence
        assert "rank 1 is at" in sentence
        assert "waiting.py" in sentence  # where the loader waits
        assert any("slow_loader" in line for line in flights[1].stacks["MainThread"])
        last = flights[0].collectives[-1]
        assert last.bytes > 0
        assert "straight" in last.at or "train_on" in last.at
        assert {"done"} < {each.state for each in flights[0].collectives}
    assert {flight.reason for flight in read(tmp_path / "signalled")} >= {"SIGUSR1"}
    assert "SIGUSR1" not in {flight.reason for flight in read(folder)[::2]}


def flight(rank: int, last: int, state: str = "waited for", **changed: object) -> Flight:
    each = [Collective(n, GATHER, "all_gather", "blocks.3", 256, "done", 9.0, "") for n in range(1, last)]
    held = Collective(last, GATHER, "all_gather", "blocks.3", 256, state, 31.4, "train.py:8 in step")
    place = "train.py:9 in main"
    made = Flight(rank, 3, (0, 1, 2), "host", 100 + rank, time.time(), "", (*each, held), {}, place)
    return replace(made, **changed)  # type: ignore[arg-type]


def other(rank: int, text: str) -> Flight:
    whole = flight(rank, 4)
    return replace(whole, collectives=(*whole.collectives[:-1], replace(whole.collectives[-1], text=text)))


@pytest.mark.host
def test_what_is_said() -> None:
    assert explain([flight(0, 4), flight(1, 3, "done"), flight(2, 4)]) == (
        f"Rank 1 has not come to where ranks 0 and 2 have waited for 31 s in collective 4, {GATHER}: rank 1 "
        "is at train.py:9 in main."
    )
    assert explain([flight(0, 4), flight(2, 4)]).startswith("Rank 1 wrote nothing, dead or without a view of")
    reduce = GATHER.replace("all_gather", "reduce_scatter")
    assert explain([flight(0, 4), other(1, reduce), flight(2, 4)]) == (
        f"The ranks issued different collectives: number 4 is {GATHER} on ranks 0 and 2 (from train.py:8 in "
        f"step), but {reduce} on rank 1 (from train.py:8 in step)."
    )
    assert "none gets on: check the connections" in explain([flight(rank, 4) for rank in range(3)])
    apart = replace(other(1, reduce), alike=(1,))  # of another coordinate: it need not issue the same
    assert "none gets on" in explain([replace(flight(r, 4), alike=(0, 2)) for r in (0, 2)] + [apart])
    one = flight(0, 4)
    given_up = replace(one.collectives[1], state="failed")  # out of memory, and the program went on
    resumed = replace(one, collectives=(one.collectives[0], given_up, *one.collectives[2:]))
    assert "31 s in collective 4" in explain([resumed, flight(1, 3, "done"), flight(2, 4)])
    assert table([resumed])[0].startswith("rank 0 (host, pid 100): collective 4")
    assert "No rank waits" in explain([flight(rank, 4, "done") for rank in range(3)])
    assert "have left or begun" in explain([flight(0, 4), flight(1, 4, "under way"), flight(2, 4)])


@pytest.mark.host
def test_a_wait_that_the_program_gives_up_has_failed() -> None:
    issued, line, handle = Issued(1, GATHER, "all_gather", "blocks.3", 256), MagicMock(), MagicMock()
    handle.wait.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        NamedHandle(handle, issued, line, MagicMock()).wait()
    assert issued.described().state == "failed"


@pytest.mark.host
def test_a_folder_without_flights_or_with_others_is_an_error(tmp_path: Path) -> None:
    result = run("explain-hang", tmp_path)
    assert result.exit_code == 2
    assert "ZERO_FLIGHT_RECORDER" in result.stderr
    flight(0, 4).write(tmp_path)
    flight(7, 4, world_size=8, time=1.0).write(tmp_path)  # of an earlier, larger job
    assert [each.rank for each in read(tmp_path)] == [0]
    (tmp_path / "rank-00001.flight.json").write_text('{"rank": 1}')
    assert "is not what a flight recorder writes" in run("explain-hang", tmp_path).stderr


def high_pipe() -> tuple[int, int]:
    """A pipe whose descriptors are those of a process with many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    low = os.pipe()
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 1100) for each in low]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for each in low:
        os.close(each)
    return high[0], high[1]


@pytest.mark.host
def test_a_recorder_of_another_thread_answers_and_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = high_pipe()
    monkeypatch.setattr(os, "pipe", lambda: pipe)
    monkeypatch.setattr("zero.observe.flight_recorder.LOOK_EVERY", 0.05)
    maker = threading.Thread(target=FlightRecorder, args=(tmp_path, 0, 2))
    maker.start()
    maker.join()
    began = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - began < 0.2
    (tmp_path / "asked").write_text("1")
    wait_until((tmp_path / "rank-00000.flight.json").exists)


@pytest.mark.host
def test_a_failure_is_written_once_for_each_engine_and_never_masked(tmp_path: Path) -> None:
    folder = tmp_path / "flights"
    made: list[FlightRecorder] = []
    maker = threading.Thread(target=lambda: made.append(FlightRecorder(folder, 0, 1)))
    maker.start()
    maker.join()
    recorder = made[0]
    for why in ("first", "second"):
        recorder.failed(why)
    assert [flight.reason for flight in read(folder)] == ["first"]
    recorder.rearm()
    recorder.failed("third")
    assert [flight.reason for flight in read(folder)] == ["third"]
    recorder.rearm()
    shutil.rmtree(folder)
    with pytest.warns(RuntimeWarning, match="could not write"):
        recorder.failed("fourth")
