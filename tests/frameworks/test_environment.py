"""The frameworks are those that constraints-frameworks.txt names, on the torch that constraints.txt names;
none starts a thread in the process that ranks are forked from."""

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.accelz.forked import threads_of_the_server

ROOT = Path(__file__).resolve().parent.parent.parent
FRAMEWORKS = ("accelerate", "transformers", "peft", "trl", "lightning", "ray")
WRITTEN_TO = ("mlflow-skinny", "prometheus_client", "tensorboard", "wandb")


@pytest.mark.parametrize("package", ["torch", *FRAMEWORKS, *WRITTEN_TO])
def test_the_version_is_the_pinned_one(package: str) -> None:
    pinned = (ROOT / "constraints.txt").read_text() + (ROOT / "constraints-frameworks.txt").read_text()
    assert f"{package}=={version(package).split('+')[0]}" in pinned.splitlines()


def test_ranks_are_forked_from_a_process_of_one_thread() -> None:
    assert len(threads_of_the_server()) == 1
