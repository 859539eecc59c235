"""Power cuts, kills and errors at every single operation of a save: what was complete still loads."""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import zero
from accelz import selection
from tests.zero.helpers.memory_storage import Fixed, MemoryStorage, Operation, Tree
from tests.zero.helpers.small_saves import contents, expected, save
from zero.files import pointer
from zero.files.manifest import MANIFEST
from zero.files.reader import Checkpoint, complete, find

pytestmark = pytest.mark.slow  # thousands of file systems after a crash

RUNS = Path("/runs/a")
ORDERS: dict[Fixed, int] = {"none": 2, "initial": 1, "all": 1}
"""By the directories that cannot be renamed, in how many orders the ranks' writes come."""
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


def prepared(scenario: Scenario, fixed: Fixed = "none") -> Tree:
    """The file system before the save."""
    storage = MemoryStorage(fixed=fixed)
    for name, steps, keep_last in scenario.before:
        assert save(storage, RUNS / name, steps, keep_last) == [None, None]
    return storage.tree(lambda: False)


def recorded(scenario: Scenario, before: Tree, fixed: Fixed = "none") -> list[tuple[str, Operation]]:
    storage = MemoryStorage(before, fixed=fixed)
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


@pytest.mark.parametrize("fixed", ORDERS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_crash_of_a_save(name: str, fixed: Fixed, states: dict[str, int]) -> None:
    scenario, generator = SCENARIOS[name], random.Random(name)
    before = prepared(scenario, fixed)
    log = recorded(scenario, before, fixed)
    for _ in range(ORDERS[fixed]):
        storage = MemoryStorage(before, fixed=fixed)
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


@pytest.mark.parametrize("fixed", ORDERS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_next_save_puts_right_what_a_crash_left(name: str, fixed: Fixed) -> None:
    scenario, generator = SCENARIOS[name], random.Random(name)
    before = prepared(scenario, fixed)
    log = recorded(scenario, before, fixed)
    storage = MemoryStorage(before, fixed=fixed)
    for operation in interleaved(log, generator):
        storage.do(*operation)
        for tree in storage.crashes(generator, mixed=1):
            after = MemoryStorage(tree, fixed=fixed)
            again = scenario.name if generator.random() < 0.5 else "step-11"
            assert save(after, RUNS / again, 11, scenario.keep_last) == [None, None]
            assert contents(find(RUNS, after), after) == (11, expected(11))
            assert not left_over(after)
            for kept, steps in scenario.stays.items():
                assert contents(RUNS / kept, after) == (steps, expected(steps))
            if name == "replacing" and again != scenario.name:
                assert contents(RUNS / scenario.name, after)[0] in (5, 9)
            if scenario.keep_last:
                assert set(after.names(RUNS)) == {"latest", again, "kept"}


def left_over(storage: MemoryStorage) -> list[str]:
    """What is hidden beside or in checkpoints, and what no manifest names."""
    found = [name for name in storage.names(RUNS) if name.startswith(".")]
    for name in complete(RUNS, storage):
        with Checkpoint(RUNS / name, storage) as checkpoint:
            named = {MANIFEST, *(file.name for file in checkpoint.manifest.files)}
        found += [f"{name}/{each}" for each in storage.names(RUNS / name) if each not in named]
    return found


@pytest.mark.parametrize("fixed", ORDERS)
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_error_at_any_operation_reaches_all_ranks_or_comes_after_publication(
    name: str, lasting: bool, fixed: Fixed, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that fails once, or from some moment on."""
    scenario = SCENARIOS[name]
    before = prepared(scenario, fixed)
    for place, (_, tried) in enumerate(recorded(scenario, before, fixed)):

        def fault(number: int, operation: Operation, place: int = place) -> None:
            if number == place or (lasting and number > place):
                raise OSError(errno.ENOSPC, "injected", operation[1])

        caplog.clear()
        storage = MemoryStorage(before, fault, fixed)
        errors = save(storage, RUNS / scenario.name, 9, scenario.keep_last)
        storage.fault = None
        if errors == [None, None]:
            steps, found = contents(find(RUNS / scenario.name, storage), storage)
            assert (steps, found) == (9, expected(9))
            assert "injected" in caplog.text or tried[:2] in (("sync names", "/"), ("sync names", "/runs"))
        else:
            assert all(isinstance(error, zero.CheckpointError) for error in errors), errors
            assert "injected" in str(errors[0])
            assert str(errors[0]) == str(errors[1])
            assert scenario.name not in complete(RUNS, storage) or steps_of(scenario.name, storage) == 5
        check(scenario, storage.tree(), done=False)
        if name == "replacing" and not lasting:
            assert storage.exists(RUNS / scenario.name)
        assert save(storage, RUNS / scenario.name, 9, scenario.keep_last) == [None, None]
        check(scenario, storage.tree(lambda: False), done=True)
        assert not left_over(storage)


def steps_of(name: str, storage: MemoryStorage) -> int:
    return contents(RUNS / name, storage)[0]


@pytest.mark.parametrize("fixed", ORDERS)
def test_a_checkpoint_that_latest_did_not_name_in_time_is_in_the_rotation(
    fixed: Fixed, caplog: pytest.LogCaptureFixture
) -> None:
    def no_pointer(number: int, operation: Operation) -> None:
        if operation[0] == "rename" and operation[2] == str(RUNS / "latest"):
            raise PermissionError(errno.EACCES, "injected", operation[1])

    storage = MemoryStorage(prepared(SCENARIOS["rotating"], fixed), fixed=fixed)
    storage.fault = no_pointer
    for steps in (7, 9):  # the second tries again, in vain
        assert save(storage, RUNS / f"step-{steps}", steps, 2) == [None, None]
        assert steps_of(f"step-{steps}", storage) == steps
        assert f"/runs/a/step-{steps} is saved, but what follows a save could not be done" in caplog.text
        assert find(RUNS, storage).name == "step-5"
    storage.fault = None
    assert save(storage, RUNS / "apart", 10) == [None, None]
    assert {"step-3", "step-5", "step-7", "step-9"} < set(storage.names(RUNS))
    assert save(storage, RUNS / "step-11", 11, 2) == [None, None]
    assert storage.names(RUNS) == ["apart", "kept", "latest", "step-11", "step-9"]


def test_a_save_that_fails_forgets_no_other_one_that_latest_does_not_name_yet() -> None:
    def fails(number: int, operation: Operation) -> None:
        kind, first, *second = operation
        if kind == "rename" and second[0] == str(RUNS / "latest") and "step-7" in broken:
            raise PermissionError(errno.EACCES, "injected", first)
        if kind == "create" and first.endswith(MANIFEST) and "step-9" in broken:
            broken.clear()
            raise PermissionError(errno.EACCES, "injected", first)

    storage = MemoryStorage(prepared(SCENARIOS["rotating"]), fault=fails)
    broken = {"step-7"}
    assert save(storage, RUNS / "step-7", 7, 2) == [None, None]
    assert find(RUNS, storage).name == "step-5"
    broken.add("step-9")
    assert all(isinstance(e, zero.CheckpointError) for e in save(storage, RUNS / "step-9", 9, 2))
    assert find(RUNS, storage).name == "step-7"
    assert save(storage, RUNS / "step-11", 11, 1) == [None, None]
    assert storage.names(RUNS) == ["kept", "latest", "step-11"]


@pytest.mark.parametrize("again", ["step-7", "step-9"])
def test_a_save_that_fails_while_latest_cannot_be_replaced_forgets_no_other_one(again: str) -> None:
    def fails(number: int, operation: Operation) -> None:
        if operation[0] == "rename" and operation[2] in {str(RUNS / name) for name in broken}:
            raise PermissionError(errno.EACCES, "injected", operation[1])

    storage = MemoryStorage(prepared(SCENARIOS["rotating"]), fault=fails)
    broken = {"latest"}
    assert save(storage, RUNS / "step-7", 7, 2) == [None, None]
    broken.add(f".{again}.zero-old" if again == "step-7" else again)
    assert all(isinstance(e, zero.CheckpointError) for e in save(storage, RUNS / again, 9, 2))
    assert find(RUNS, storage).name == "step-5"
    broken.clear()
    assert save(storage, RUNS / "apart", 10) == [None, None]
    assert storage.names(RUNS) == ["apart", "kept", "latest", "step-3", "step-5", "step-7"]
    assert save(storage, RUNS / "step-11", 11, 1) == [None, None]
    assert storage.names(RUNS) == ["apart", "kept", "latest", "step-11"]


def test_a_rotation_that_nobody_would_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage(prepared(SCENARIOS["rotating"]))
    monkeypatch.setattr(pointer, "LARGEST_LATEST", 140)
    assert save(storage, RUNS / "step-7", 7, 9) == [None, None]
    errors = save(storage, RUNS / "step-9", 9, 9)
    assert all("lists 4 checkpoints for rotation; lower keep_last" in str(error) for error in errors)
    assert find(RUNS, storage).name == "step-7"
    assert not left_over(storage)


def test_what_cannot_be_removed_disturbs_no_save_and_is_removed_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stays(number: int, operation: Operation) -> None:
        if operation[0] == "remove" and ("step-3" in operation[1] or ".same.zero-old" in operation[1]):
            raise PermissionError(errno.EACCES, "injected", operation[1])

    storage = MemoryStorage(prepared(SCENARIOS["rotating"]))
    assert save(storage, RUNS / "same", 6) == [None, None]
    storage.fault = stays
    assert save(storage, RUNS / "same", 7) == [None, None]
    assert save(storage, RUNS / "step-9", 9, 1) == [None, None]
    assert save(storage, RUNS / "step-11", 11, 1) == [None, None]
    assert caplog.text.count("before /runs/a/step-11 is saved, what an earlier save has left to do") == 1
    assert {".same.zero-old", ".step-3.zero-trash"} < set(storage.names(RUNS))
    storage.fault = None
    assert save(storage, RUNS / "step-13", 13, 1) == [None, None]
    assert storage.names(RUNS) == ["kept", "latest", "same", "step-13"]
