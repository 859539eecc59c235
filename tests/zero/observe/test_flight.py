"""Flight recorders: what they write of a job that hangs, and what is said about it."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import resource
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist

import zero
from accelz.conformance.cluster import Context
from tests.zero.helpers.commands import refused, run
from tests.zero.helpers.failing import TIMEOUT, Ranks
from tests.zero.helpers.flights import GATHER, flight
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.paths import decaying, fresh, straight
from tests.zero.helpers.waiting import wait_until
from zero.communication.communicator import NamedHandle
from zero.communication.reports import Issued
from zero.observe.flight_file import Flight, path_of, read
from zero.observe.flight_recorder import FlightRecorder
from zero.observe.hang import explain, table


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
        ends = [line for line in flights[0].lines if line.collectives]  # others are of earlier tests' engines
        mine = [e for e in ends if any(at in e.collectives[-1].at for at in ("straight", "train_on"))][-1]
        assert mine.collectives[-1].bytes > 0
        assert {"done"} < {each.state for each in mine.collectives}
    assert {flight.reason for flight in read(tmp_path / "signalled")} >= {"SIGUSR1"}
    assert "SIGUSR1" not in {flight.reason for flight in read(folder)[::2]}


def altered(whole: Flight, at: int, **changed: object) -> Flight:
    """With another collective at a place."""
    (line,) = whole.lines
    every = list(line.collectives)
    every[at] = replace(every[at], **changed)  # type: ignore[arg-type]
    return replace(whole, lines=(replace(line, collectives=tuple(every)),))


def other(rank: int, text: str, alike: tuple[int, ...] = (0, 1, 2)) -> Flight:
    return altered(flight(rank, 4, alike=alike), -1, text=text)


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
    apart = other(1, reduce, alike=(1,))  # of another coordinate: it need not issue the same
    assert "none gets on" in explain([flight(r, 4, alike=(0, 2)) for r in (0, 2)] + [apart])
    resumed = altered(flight(0, 4), 1, state="failed")  # out of memory, and the program went on
    assert "31 s in collective 4" in explain([resumed, flight(1, 3, "done"), flight(2, 4)])
    assert table([resumed])[0].startswith("rank 0 (host, pid 100): collective 4")
    assert "No rank waits" in explain([flight(rank, 4, "done") for rank in range(3)])
    assert "have left or begun" in explain([flight(0, 4), flight(1, 4, "under way"), flight(2, 4)])


@pytest.mark.host
def test_what_is_said_of_several_engines() -> None:
    """Ranks 0 and 1 have an engine, ranks 1 and 2 another one: 0 waits for 1, which waits for 2."""
    whole = [flight(rank, 4) for rank in range(3)]
    first = [replace(each.lines[0], key="first", alike=(0, 1)) for each in whole[:2]]
    second = [replace(each.lines[0], key="second", alike=(1, 2)) for each in whole[1:]]
    left = replace(first[1], collectives=first[1].collectives[:-1])
    busy = replace(second[1], collectives=second[1].collectives[:-1])
    flights = [
        replace(whole[0], lines=(first[0],)),
        replace(whole[1], lines=(left, second[0])),
        replace(whole[2], lines=(busy,)),
    ]
    assert explain(flights).startswith("Rank 2 has not come to where rank 1 has waited for 31 s")
    assert [line.split(":")[1].split(",")[0] for line in table(flights)] == [
        " collective 4",
        " collective 4",
        " collective 3",
    ]
    late = [*flights[:2], replace(whole[2], lines=())]  # whose engine is not made yet
    assert explain(late).startswith("Rank 2 has not come to where rank 1 has waited for 31 s")


def recorded_body(context: Context, folder: str) -> tuple[list[tuple[tuple[int, ...], bool]], str]:
    """Two engines, one of which is made later and of groups of its own, and faulthandler beside."""
    with open(Path(folder, f"stderr-{context.rank}"), "w+") as stderr:
        before, sys.stderr = sys.stderr, stderr
        faulthandler.register(signal.SIGUSR1)
        again = dist.new_group(list(range(context.size)))
        model, own = fresh(), fresh()
        engine = zero.initialize(model, decaying(model), zero.Config(timeout=20))
        engine.record_flight(folder)
        other = zero.initialize(own, decaying(own), zero.Config(timeout=20), process_group=again)
        train_on(engine, straight(model, 0, context.rank))
        train_on(other, straight(own, 0, context.rank))
        engine._communicator.barrier("both have trained")
        if context.rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: path_of(Path(folder), context.rank).exists())
        engine._communicator.barrier("all have written")
        sys.stderr = before
        stderr.seek(0)
        (mine,) = [flight for flight in read(Path(folder)) if flight.rank == context.rank]
        lines = {line.key: line for line in mine.lines}  # those of earlier tests' engines among them
        both = [lines[each._communicator.ledger.line.key] for each in (engine, other)]
        return [(line.alike, len(line.collectives) > 3) for line in both], stderr.read()


def test_all_engines_are_recorded_and_faulthandler_writes_too(disposable: Ranks, tmp_path: Path) -> None:
    told = disposable(2).run(recorded_body, limit=60, folder=str(tmp_path))
    for lines, _ in told:
        assert lines == [((0, 1), True), ((0, 1), True)]
    assert "recorded_body" in told[0][1]


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
    told = refused("explain-hang", tmp_path)
    assert told.endswith("is not what a flight recorder writes: world_size: Field required")
    (tmp_path / "rank-00000.flight.json").unlink()
    os.mkfifo(tmp_path / "rank-00000.flight.json")
    with pytest.raises(zero.StateError, match="is no regular file"):
        read(tmp_path)


@pytest.mark.host
def test_a_name_that_is_not_text_is_written_as_well_as_can_be(tmp_path: Path) -> None:
    at = os.fsdecode(b"/caf\xe9/train.py:3")
    flight(0, 1, place=at).write(tmp_path)
    assert [each.place for each in read(tmp_path)] == ["/caf?/train.py:3"]


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
