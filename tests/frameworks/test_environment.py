"""The frameworks are those that constraints-frameworks.txt names, on the torch that constraints.txt names."""

from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FRAMEWORKS = ("accelerate", "transformers", "peft", "trl", "lightning", "ray")
WRITTEN_TO = ("mlflow-skinny", "prometheus_client", "tensorboard", "wandb")


@pytest.mark.parametrize("package", ["torch", *FRAMEWORKS, *WRITTEN_TO])
def test_the_version_is_the_pinned_one(package: str) -> None:
    pinned = (ROOT / "constraints.txt").read_text() + (ROOT / "constraints-frameworks.txt").read_text()
    assert f"{package}=={version(package).split('+')[0]}" in pinned.splitlines()
