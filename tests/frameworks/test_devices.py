"""zero.integrations on a device that accelz has learnt of by a vendor's package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from accelz.conformance.cluster import Cluster, Clusters
from tests.frameworks import accelerate_loops as loops
from tests.frameworks import peft_runs, trainer_runs, trl_runs
from tests.frameworks.jobs import assert_same_log, furthest


@pytest.fixture(scope="module")
def on_sim() -> Iterator[Cluster]:
    pytest.importorskip("accelz_sim")
    made = Cluster("sim", 2)
    yield made
    made.stop()


Runs = dict[str, tuple[Callable[..., Any], dict[str, Any]]]
LOOPS: Runs = {
    "every_batch": (loops.trained, {"clip_norm": 0.5}),
    "windows": (
        loops.trained,
        {"settings": {"gradient_accumulation_steps": 3}, "clip_value": 1e-3, "epochs": 2},
    ),
    "metrics": (loops.evaluated, {}),
    "chosen_by_accelz": (loops.trained, {"told": False}),
}
TRAINERS: Runs = {
    "trainer": (trainer_runs.trained, {"settings": {"gradient_accumulation_steps": 3}, "told": False}),
    "resumed": (trainer_runs.twice, {}),
    "dora": (peft_runs.adapted, {"kind": "dora"}),
    "sft": (trl_runs.fine_tuned, {"settings": {"packing": True}, "adapter": True}),
    "dpo": (trl_runs.preferred, {"reference": "synced"}),
    "grpo": (trl_runs.reinforced, {"reference": "adapter"}),
}


@pytest.fixture(scope="module")
def plain(on_sim: Cluster, cluster: Clusters, tmp_path_factory: Any) -> Any:
    """What rank 0 of the frameworks' own runs has. Accelerate's are on CPUs: on such a device a model has
    other parameters after its move, which leaves the optimizer behind."""
    known: dict[str, Any] = {}

    def run(name: str) -> Any:
        if name in LOOPS and name not in known:
            body, arguments = LOOPS[name]
            known[name] = cluster(2).run(body, stage=None, **arguments)[0]
        elif name not in known:
            body, arguments = TRAINERS[name]
            directory = str(tmp_path_factory.mktemp(name))
            known[name] = on_sim.run(body, stage=None, directory=directory, **arguments)[0]
        return known[name]

    return run


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", LOOPS)
def test_accelerate(on_sim: Cluster, plain: Any, name: str, stage: int) -> None:
    """Within what another device's kernels round otherwise."""
    body, arguments = LOOPS[name]
    found, wanted = on_sim.run(body, stage=stage, **arguments)[0], plain(name)
    for key, values in wanted.get("log", wanted).items():
        assert found.get("log", found)[key] == pytest.approx(values, rel=1e-6, abs=1e-6), key
    assert furthest(found.get("weights", {}), wanted.get("weights", {})) < 1e-5


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", TRAINERS)
def test_trainers(on_sim: Cluster, plain: Any, tmp_path: Path, name: str, stage: int) -> None:
    body, arguments = TRAINERS[name]
    found = on_sim.run(body, stage=stage, directory=str(tmp_path), **arguments)[0]
    wanted = plain(name)
    assert_same_log(found["log"], wanted["log"], 1e-5 if name in ("dpo", "grpo") else 1e-6)
    values = {"weights", "saved", "sent"} & wanted.keys()
    assert max(furthest(found[key], wanted[key]) for key in values) < 1e-6


def test_every_trainer_of_a_process_uses_the_device_unless_another_is_named(on_sim: Cluster) -> None:
    """On one rank, where arguments that ask for the host choose it whatever the environment names."""
    for kinds in on_sim.run(trainer_runs.devices_of_arguments):
        assert kinds == ["sim", "sim", "cpu"]
