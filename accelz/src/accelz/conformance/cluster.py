"""Ranks for distributed tests: worker processes that are started once and run many test bodies.

A body is a module-level function `body(context, **arguments)`. Every run has a hard time limit: when it is
over, each rank still running prints its stack, all ranks are killed and the test fails. So a hang is a
failure, and does not stall the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
from torch.distributed import TCPStore

from accelz import selection
from accelz.accelerator import Accelerator
from accelz.conformance import progress
from accelz.conformance.contract import ContractBroken, checked, unguarded
from accelz.conformance.grouping import alike
from accelz.gloo.lanes import share_transport
from accelz.patience import patience
from accelz.ranks.group import Group

START_SECONDS = 60.0
GRACE_SECONDS = 3.0
_PRELOADED = [__name__, "pytest"]
_FIRST, _LAST = "accelz.conformance.imports_begin", "accelz.conformance.imports_end"


@dataclass(frozen=True)
class Context:
    """What a body is given: the accelerator, bound for this rank, and the group of all ranks."""

    accelerator: Accelerator
    group: Group

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size


@dataclass(frozen=True)
class Outcome:
    """How a body ended on one rank. error: "Type: message"; text: the traceback.

    For a broken contract, error is the message of `ContractBroken`, method is set and text is empty, because
    the message says everything. For a rank that died or hung, method is the one it was in.
    """

    rank: int
    status: Literal["returned", "raised", "died", "hung"]
    value: Any = None
    error: str = ""
    text: str = ""
    method: str = ""


class ClusterError(AssertionError):
    """A body did not return on every rank. method: the method whose contract broke, or "". everywhere:
    whether it broke on every rank.

    If a rank broke a contract, the message is that of `ContractBroken`, and then what the other ranks did.
    Ranks that differ in numbers alone are told once.
    """

    def __init__(self, what: str, size: int, bad: list[Outcome]) -> None:
        # Ranks hang because another one has raised, not the other way round: blame the one that raised.
        told = sorted((o for o in bad if o.method), key=lambda o: o.status != "raised")
        self.method = told[0].method if told else ""
        self.everywhere = sum(o.method == self.method and o.status == "raised" for o in told) == size
        ways: dict[tuple[str, str], list[Outcome]] = {}
        for o in [*told, *bad]:
            alike_ones = ways.setdefault((o.status, alike(f"{o.error}\n{o.text}")), [])
            alike_ones.extend([] if o in alike_ones else [o])
        groups = list(ways.values())
        if self.method and told[0].status == "raised":
            first, *others = groups
            lines = [told[0].error]
            if others or len(first) < size:
                lines += [f"  on:   {_ranks(first)} of {size}"]
        else:
            lines = [
                f"{self.method}: must return on every rank" if self.method else f"{what} at {size} ranks"
            ]
            others = groups
        lines += [f"{_ranks(g)} {g[0].status}: {g[0].error}\n{g[0].text}".rstrip() for g in others]
        super().__init__("\n".join(lines))


def _ranks(outcomes: list[Outcome]) -> str:
    ranks = sorted(o.rank for o in outcomes)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@dataclass
class Cluster:
    """`size` ranks on the backend `device`. timeout: seconds for collectives inside the bodies."""

    device: str
    size: int
    timeout: float = 20.0
    threads: int = 1
    _workers: list[tuple[BaseProcess, Connection]] = field(default_factory=list)
    _notes: list[Any] = field(default_factory=list)
    _store: TCPStore | None = None

    def run(self, body: Callable[..., Any], *, limit: float = 60.0, **arguments: Any) -> list[Any]:
        """Run `body` on every rank and return its values by rank; raises ClusterError if a rank fails.

        Once a rank has failed, the others get GRACE_SECONDS more, since they would only wait for it.
        """
        outcomes = self._outcomes(body, arguments, limit, GRACE_SECONDS)
        bad = [o for o in outcomes if o.status != "returned"]
        if bad:
            raise ClusterError(body.__name__, self.size, bad)
        return [o.value for o in outcomes]

    def outcomes(self, body: Callable[..., Any], *, limit: float = 60.0, **arguments: Any) -> list[Outcome]:
        """Run `body` on every rank and return how each ended. If any fails, the next run starts new ranks."""
        return self._outcomes(body, arguments, limit, limit)

    def _outcomes(
        self, body: Callable[..., Any], arguments: dict[str, Any], limit: float, grace: float
    ) -> list[Outcome]:
        self.start()
        try:
            for _, pipe in self._workers:
                with contextlib.suppress(BrokenPipeError):  # that rank is gone: _collect reports it
                    pipe.send((body, arguments))
            outcomes = self._collect(limit * patience(), grace)
        except BaseException:  # such as a test's own time limit: late answers must not reach the next body
            self.stop()
            raise
        if any(o.status != "returned" for o in outcomes):
            self.stop()  # the group may be unusable; the next run starts afresh
        return outcomes

    def stop(self) -> None:
        """End all ranks now."""
        for process, pipe in self._workers:
            process.kill()
            pipe.close()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()
        self._notes.clear()
        self._store = None

    def start(self) -> None:
        """Start the ranks unless they are running; raises ClusterError if any cannot join."""
        if self._workers:
            return
        # The store lives in this process, so that it outlives any rank.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = _forkserver()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            note = context.RawArray(ctypes.c_char, progress.SIZE)
            setup = (self.device, rank, self.size, self._store.port, self.timeout, self.threads)
            arguments = (theirs, note, *setup, dict(os.environ))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
            self._notes.append(note)
        started = self._collect(START_SECONDS * patience(), GRACE_SECONDS)
        failed = [o for o in started if o.status != "returned"]
        if failed:
            self.stop()
            raise ClusterError("start", self.size, failed)

    def _collect(self, limit: float, grace: float) -> list[Outcome]:
        deadline = time.monotonic() + limit
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self.size:
            pending = {pipe: r for r, (_, pipe) in enumerate(self._workers) if r not in outcomes}
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                alone = all(o.status == "returned" for o in outcomes.values())  # else they wait for another
                if alone:
                    self._dump_stacks(list(pending.values()))
                outcomes.update({r: self._hung(r, alone) for r in pending.values()})
            for pipe in ready:
                assert isinstance(pipe, Connection)
                outcome = outcomes[pending[pipe]] = self._receive(pipe, pending[pipe])
                if outcome.status != "returned":
                    deadline = min(deadline, time.monotonic() + grace)
        return [outcomes[r] for r in range(self.size)]

    def _receive(self, pipe: Connection, rank: int) -> Outcome:
        try:
            outcome = pipe.recv()
        except (EOFError, OSError):
            method = self._method(rank)
            died = f"the process ended without an answer{f', in {method}' if method else ''}"
            return Outcome(rank, "died", error=died, method=method)
        assert isinstance(outcome, Outcome)
        return outcome

    def _hung(self, rank: int, shown: bool) -> Outcome:
        method = self._method(rank)
        said = f"still {f'in {method}' if method else 'running'} when the time was up"
        said += "; its stack is on stderr" if shown else ""
        return Outcome(rank, "hung", error=said, method=method)

    def _method(self, rank: int) -> str:
        """The method of the backend that the rank was in last, or ""."""
        return str(self._notes[rank].value.decode())

    def _dump_stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            process = self._workers[rank][0]
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)


class Clusters:
    """One `Cluster` per world size, started when first asked for and reused after that."""

    def __init__(self, device: str, timeout: float = 20.0) -> None:
        self.device = device
        self.timeout = timeout
        self._by_size: dict[int, Cluster] = {}

    def __call__(self, size: int) -> Cluster:
        if size not in self._by_size:
            self._by_size[size] = Cluster(self.device, size, self.timeout)
        return self._by_size[size]

    def stop(self, but: int = 0) -> None:
        """End all ranks of all sizes but one."""
        for size, cluster in self._by_size.items():
            if size != but:
                cluster.stop()


def preload(*modules: str) -> None:
    """Have the server of `_forkserver` import these modules too: those that bodies would import in every new
    rank. To be called before the server starts. Importing them must not use a device."""
    _PRELOADED.extend(modules)


def prepare() -> None:
    """Start the server of `_forkserver` now, so that it imports torch while this process goes on."""
    _forkserver()
    ensure_running()


def _forkserver() -> ForkServerContext:
    """A context that forks processes from a server with torch imported, so that ranks start at once.

    The server has used no device. Its heap is frozen.
    """
    multiprocessing.set_forkserver_preload([_FIRST, *_PRELOADED, _LAST])
    return multiprocessing.get_context("forkserver")


def _serve(
    pipe: Connection,
    note: Any,
    device: str,
    rank: int,
    size: int,
    port: int,
    timeout: float,
    threads: int,
    environ: dict[str, str],
) -> None:
    """A worker's life: join the job, then run bodies until the pipe closes."""
    os.environ.clear()
    os.environ.update(environ)
    progress.keep_in(note)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    os.environ |= {"LOCAL_RANK": str(rank), "ACCELZ_DEVICE": device}
    torch.set_num_threads(threads)
    share_transport()

    def join() -> Context:
        accelerator = checked(selection.use(device))
        accelerator.bind(rank)
        store = TCPStore("127.0.0.1", port, is_master=False)
        _meet(store, rank, size)
        group = accelerator.collectives.init(timeout, rank, size, store)
        return Context(unguarded(accelerator), group)

    outcome, context = _attempt(rank, join)
    gc.freeze()  # garbage collections in bodies then look at the bodies' own objects only
    pipe.send(replace(outcome, value=None))
    while True:
        try:
            body, arguments = pipe.recv()
        except (EOFError, OSError):
            break
        result, _ = _attempt(rank, lambda: body(context, **arguments))  # noqa: B023
        with contextlib.suppress(OSError):
            _send(pipe, result)
    os._exit(0)  # without teardown: peers may be gone, and nothing here needs one


def _meet(store: TCPStore, rank: int, size: int) -> None:
    """Return when every rank has started: on a busy machine that can exceed the timeout of a collective."""
    store.set(f"started/{rank}", "")
    limit = timedelta(seconds=START_SECONDS * patience())
    store.wait([f"started/{r}" for r in range(size)], limit)


def _attempt(rank: int, call: Callable[[], Any]) -> tuple[Outcome, Any]:
    try:
        value = call()
    except ContractBroken as broken:
        return Outcome(rank, "raised", None, str(broken), method=broken.method), None
    except BaseException as error:
        text = traceback.format_exc()
        return Outcome(rank, "raised", None, f"{type(error).__name__}: {error}", text), None
    return Outcome(rank, "returned", value), value


def _send(pipe: Connection, outcome: Outcome) -> None:
    try:
        pipe.send(outcome)
    except Exception as error:  # a value that does not pickle is the body's mistake: report it
        pipe.send(Outcome(outcome.rank, "raised", None, f"the returned value does not pickle: {error}"))
