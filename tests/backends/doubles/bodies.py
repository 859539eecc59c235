"""Tests whose bodies run on a machine with a double: one process imports torch, each body is a fork of it.

on_machine = Bodies()

@on_machine(PT_HPU_LAZY_MODE="1")
def test_something() -> None: ...          # runs in a process of its own, with this environment

@pytest.fixture(scope="module")
def outcomes(...): return on_machine.run(machine, __name__, **environment)
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

from tests.backends.doubles.machine import Machine

Body = Callable[[], None]
Test = Callable[[dict[str, str]], None]


class Bodies:
    """The bodies of one test module, by name, and the environment that each wants."""

    def __init__(self) -> None:
        self.all: dict[str, tuple[Body, dict[str, str]]] = {}

    def __call__(self, **environment: str) -> Callable[[Body], Test]:
        def decorate(body: Body) -> Test:
            name = body.__name__
            self.all[name] = (body, environment)

            def test(outcomes: dict[str, str]) -> None:
                assert outcomes[name] == "", outcomes[name]

            test.__name__, test.__doc__ = name, body.__doc__
            return test

        return decorate

    def run(self, machine: Machine, module: str, **environment: str) -> dict[str, str]:
        """Run every body; the traceback of each by name, "" where it passed."""
        done = machine.run("-m", __name__, module, **environment)
        assert done.returncode == 0, done.stderr
        outcomes: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return outcomes


def _main(module: str) -> None:
    import torch.distributed.tensor  # noqa: F401 (assert_close wants it: once, for all forks)

    bodies: Any = next(v for v in vars(import_module(module)).values() if type(v).__name__ == "Bodies")
    outcomes = {name: _forked(body, environment) for name, (body, environment) in bodies.all.items()}
    print(json.dumps(outcomes))


def keep_the_device() -> None:
    """Let the engine's own work have the device, which here is a function mode, as a program's own are."""
    from zero.tiers import apart

    apart._function_modes = lambda: 0  # type: ignore[assignment]


def _forked(body: Body, environment: dict[str, str]) -> str:
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        os.environ.update(environment)
        text = ""
        try:
            body()
        except BaseException:
            text = traceback.format_exc()
        with os.fdopen(sink, "w") as pipe:
            pipe.write(text)
        os._exit(0)
    os.close(sink)
    with os.fdopen(source) as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return text if code == 0 else f"the process ended with {code}"


if __name__ == "__main__":
    _main(sys.argv[1])
