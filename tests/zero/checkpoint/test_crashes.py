"""Power cuts, kills and errors at every single operation of a save: what was complete still loads."""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import zero
from accelz import selection
from tests.zero.checkpoint.memory_storage import MemoryStorage, Operation, Tree
from tests.zero.checkpoint.small_saves import contents, expected, save
from zero.checkpoint.reader import complete, find

RUNS = Path("/runs/a")
ORDERS = 4  # in which the ranks' writes come
MIXTURES = 8  # of lost and kept changes, for every operation
LEAST_STATES = 2000


@dataclass(frozen=True)
class Scenario:
    """A save of `name` at step 9 over earlier saves: (name, steps, keep_last)."""

    name: str
    before: tuple[tuple[str, int, int | None], ...] = ()
    keep_last: int | None = None
    stays: dict[str, int] = field(default_factory=dict)  # checkpoints that must survive, with their steps


SCENARIOS = {
    "first": Scenario("step-9"),
    "second": Scenario("step-9", (("step-5", 5, None),), stays={"step-5": 5}),
    "replacing": Scenario("same", (("other", 4, None), ("same", 5, None)), stays={"other": 4}),
    "rotating": Scenario(
        "step-9",
        (("kept", 1, None), ("step-3", 3, 2), ("step-5", 5, 2)),
        keep_last=1,
        stays={"kept": 1},
    ),
}


@pytest.fixture(autouse=True, scope="module")
def on_the_host() -> None:
    selection.use("cpu")


def prepared(scenario: Scenario) -> Tree:
    """The file system before the save."""
    storage = MemoryStorage()
    for name, steps, keep_last in scenario.before:
        assert save(storage, RUNS / name, steps, keep_last) == [None, None]
    return storage.tree(lambda: False)


def recorded(scenario: Scenario, before: Tree) -> list[tuple[str, Operation]]:
    storage = MemoryStorage(before)
    assert save(storage, RUNS / scenario.name, 9, scenario.keep_last) == [None, None]
    return storage.log


def interleaved(log: list[tuple[str, Operation]], generator: random.Random) -> list[Operation]:
    """Another order in which the ranks' writes may have come: each rank's own order stays."""
    kinds = [operation[0] + Path(operation[1]).name for _, operation in log]
    first = next(i for i, kind in enumerate(kinds) if kind.startswith("createrank-"))
    last = kinds.index("createmanifest.json")
    queues = [[o for name, o in log[first:last] if name == f"rank {rank}"] for rank in (0, 1)]
    middle = []
    while any(queues):
        middle.append(generator.choice([q for q in queues if q]).pop(0))
    return [o for _, o in log[:first]] + middle + [o for _, o in log[last:]]


def check(scenario: Scenario, tree: Tree, done: bool) -> None:
    """Load what is there after a crash. done: the save had returned."""
    storage = MemoryStorage(tree)
    allowed = {9} if done else {9, *(steps for _, steps, _ in scenario.before[-1:])}
    try:
        path = find(RUNS, storage)
    except zero.CorruptCheckpointError:
        raise
    except zero.CheckpointError:
        assert not scenario.before
        assert not done
    else:
        steps, found = contents(path, storage)
        assert steps in allowed
        assert found == expected(steps)
    for name, steps in scenario.stays.items():
        assert contents(RUNS / name, storage) == (steps, expected(steps))
    for name in complete(RUNS, storage):
        steps, found = contents(RUNS / name, storage)
        assert found == expected(steps), name


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_crash_of_a_save(name: str, states: dict[str, int]) -> None:
    scenario, generator = SCENARIOS[name], random.Random(name)
    before = prepared(scenario)
    log = recorded(scenario, before)
    for _ in range(ORDERS):
        storage = MemoryStorage(before)
        operations = interleaved(log, generator)
        for number, operation in enumerate(operations):
            storage.do(*operation)
            for tree in storage.crashes(generator, MIXTURES):
                check(scenario, tree, done=number + 1 == len(operations))
                states[name] = states.get(name, 0) + 1


def test_there_were_enough_crashes(states: dict[str, int]) -> None:
    if set(states) == set(SCENARIOS):  # not when run by itself
        assert sum(states.values()) >= LEAST_STATES, states


@pytest.fixture(scope="module")
def states() -> dict[str, int]:
    """Crash states looked at, by scenario."""
    return {}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_next_save_puts_right_what_a_crash_left(name: str) -> None:
    scenario, generator = SCENARIOS[name], random.Random(name)
    before = prepared(scenario)
    log = recorded(scenario, before)
    storage = MemoryStorage(before)
    for operation in interleaved(log, generator):
        storage.do(*operation)
        for tree in storage.crashes(generator, mixed=1):
            after = MemoryStorage(tree)
            again = scenario.name if generator.random() < 0.5 else "step-11"
            assert save(after, RUNS / again, 11, scenario.keep_last) == [None, None]
            assert contents(find(RUNS, after), after) == (11, expected(11))
            assert not [n for n in after.names(RUNS) if n.startswith(".")]
            for kept, steps in scenario.stays.items():
                assert contents(RUNS / kept, after) == (steps, expected(steps))
            if name == "replacing" and again != scenario.name:
                assert contents(RUNS / scenario.name, after)[0] in (5, 9)
            if scenario.keep_last:
                assert set(after.names(RUNS)) - {"latest", again} <= {"kept", "step-9"}


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_error_at_any_operation_reaches_all_ranks(name: str, lasting: bool) -> None:
    """A disk that fails once, or from some moment on."""
    scenario = SCENARIOS[name]
    before = prepared(scenario)
    for place in range(len(recorded(scenario, before))):

        def fault(number: int, operation: Operation, place: int = place) -> None:
            if number == place or (lasting and number > place):
                raise OSError(errno.ENOSPC, "injected", operation[1])

        storage = MemoryStorage(before, fault)
        errors = save(storage, RUNS / scenario.name, 9, scenario.keep_last)
        if errors == [None, None]:
            continue
        storage.fault = None
        assert all(isinstance(error, zero.CheckpointError) for error in errors), errors
        assert "injected" in str(errors[0])
        assert str(errors[0]) == str(errors[1])
        check(scenario, storage.tree(), done=False)
        if name == "replacing" and not lasting:
            assert storage.exists(RUNS / scenario.name)
        assert save(storage, RUNS / scenario.name, 9, scenario.keep_last) == [None, None]
        check(scenario, storage.tree(lambda: False), done=True)
        assert not [n for n in storage.names(RUNS) if n.startswith(".")]
