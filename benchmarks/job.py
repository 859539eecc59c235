"""The ranks of one launch: worker processes, each of which holds one object and answers calls on it.

Ranks find each other as under torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), through a store that
this process hosts. Every call has a time limit: a hang is a failure, and the ranks are killed.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection, wait
from typing import Any, Self

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.hosts import INTERFACE, Hosts

HOST = "127.0.0.1"
GRACE = 10.0  # seconds that ranks have to leave before they are killed
LAUNCH_LIMIT = 300.0  # seconds to start or build; a peer may compile an extension at its first use


class JobError(Exception):
    """A rank raised, died or did not answer in time. The message has its traceback, if there is one."""


class Job:
    """`ranks` processes, each with `service(*args)`; `call` runs one of its methods on every rank.

    threads: OMP threads per rank. limit: seconds that a call may take. hosts: the ranks are divided evenly
    among these, and this process is on the first; None: all ranks are where this process is.
    """

    def __init__(
        self,
        service: Callable[..., object],
        args: tuple[Any, ...],
        ranks: int,
        threads: int,
        limit: float,
        hosts: Hosts | None = None,
    ) -> None:
        self._limit = limit
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        each = ranks if hosts is None else ranks // len(hosts.places)
        for rank in range(ranks):
            place = nullcontext if hosts is None else hosts.places[rank // each]
            torchrun = _torchrun(rank, ranks, each, threads, self._store.port)
            with place(), _environment(torchrun if hosts is None else torchrun | _between(hosts)):
                self._start(service, args)
        self._collect("start", LAUNCH_LIMIT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        return [p.pid for p in self._processes if p.pid is not None]

    def call(self, method: str, *args: Any, limit: float | None = None) -> list[Any]:
        """Run `method(*args)` on all ranks at once and return the results by rank. Raises JobError.

        limit: seconds; None for the job's own limit.
        """
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((method, args))
            except OSError:
                self._fail(f"rank {rank} died before {method}")
        return self._collect(method, self._limit if limit is None else limit)

    def stop(self) -> None:
        """End the ranks, by force if they do not leave."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + GRACE
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0))
        self._kill()

    def _start(self, service: Callable[..., object], args: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, service, args), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(mine)

    def _collect(self, method: str, limit: float) -> list[Any]:
        deadline = time.monotonic() + limit
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            waiting = {p: r for r, p in enumerate(self._pipes) if r not in results}
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                self._fail(f"ranks {list(waiting.values())} took over {limit:g} s in {method}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                results[waiting[pipe]] = self._receive(pipe, waiting[pipe], method)
        return [results[rank] for rank in range(len(self._pipes))]

    def _receive(self, pipe: Connection, rank: int, method: str) -> Any:
        try:
            good, value = pipe.recv()
        except (EOFError, OSError):
            self._fail(f"rank {rank} died in {method}")
        if not good:
            self._fail(f"rank {rank} failed in {method}:\n{value}")
        return value

    def _fail(self, why: str) -> None:
        self._kill()
        raise JobError(why)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, service: Callable[..., object], args: tuple[Any, ...]) -> None:
    """A rank's process: build the object, then answer calls until the pipe is closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # stdout is for the report
    try:
        held = service(*args)
        pipe.send((True, None))
        while True:
            method, arguments = pipe.recv()
            pipe.send((True, getattr(held, method)(*arguments)))
    except EOFError:
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()


def _between(hosts: Hosts) -> dict[str, str]:
    """Further environment variables for ranks on several hosts."""
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # no warnings that these addresses have no names
    return {"MASTER_ADDR": hosts.address, "GLOO_SOCKET_IFNAME": INTERFACE, **quiet}


def _torchrun(rank: int, ranks: int, each: int, threads: int, port: int) -> dict[str, str]:
    """The environment variables of torchrun. each: ranks per host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % each),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(each),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is hosted here, not by rank 0
        "OMP_NUM_THREADS": str(threads),
    }


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables during the block, since a child must have them before it imports torch."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
