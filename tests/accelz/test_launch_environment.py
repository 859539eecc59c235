"""Which environments are a job of one rank, which are torchrun's, and which are refused."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from accelz import CollectiveError, Collectives
from accelz.ranks.launch_environment import place_of_this_process

NAMES = (
    *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
)


@pytest.fixture
def environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for assignment in request.param.split():
        monkeypatch.setenv(*assignment.split("="))


@pytest.mark.parametrize(
    "environment",
    [
        "",
        "RANK= WORLD_SIZE=",
        "WORLD_SIZE=1",
        "WORLD_SIZE=1 SLURM_STEP_NUM_TASKS=4",
        "RANK=0 WORLD_SIZE=1",
        "SLURM_NTASKS=4",  # a batch script
        "SLURM_STEP_NUM_TASKS=1 PMI_SIZE=1",
    ],
    indirect=True,
)
@pytest.mark.usefixtures("environment")
def test_a_process_alone_is_a_job_of_one_rank() -> None:
    place = place_of_this_process(10.0)
    assert (place["rank"], place["world_size"]) == (0, 1)
    assert isinstance(place["store"], HashStore)


@pytest.mark.parametrize(
    "environment",
    [
        "RANK=1 WORLD_SIZE=2",
        "RANK=1 WORLD_SIZE=2 MASTER_PORT=nine MASTER_ADDR=here",
        "RANK=0 WORLD_SIZE=1 MASTER_ADDR=here",
        "RANK=3 WORLD_SIZE=4 PMI_SIZE=2",
    ],
    indirect=True,
)
@pytest.mark.usefixtures("environment")
def test_torch_says_what_is_wrong_with_other_variables() -> None:
    assert place_of_this_process(10.0) == {}


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ("RANK=2 WORLD_SIZE=2", "RANK=2 and WORLD_SIZE=2: .*less than WORLD_SIZE"),
        ("RANK=-1 WORLD_SIZE=2", "whole numbers"),
        ("RANK=zero WORLD_SIZE=2", "RANK=zero and WORLD_SIZE=2: they must be whole numbers"),
        ("RANK=0 WORLD_SIZE=0", "less than WORLD_SIZE"),
        ("RANK=1", "RANK=1, but WORLD_SIZE is not set: .*torchrun"),
        ("RANK=0 WORLD_SIZE=", "WORLD_SIZE is not set"),
        ("PMI_SIZE=2 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0", "by srun, .*SLURM_LOCALID"),
        ("WORLD_SIZE=2", "WORLD_SIZE=2, but RANK is not set: .*torchrun"),
        ("SLURM_STEP_NUM_TASKS=2", "2 processes were started by srun, .*SLURM_PROCID.*WORLD_SIZE=1$"),
        ("OMPI_COMM_WORLD_SIZE=3 SLURM_STEP_NUM_TASKS=2", "3 processes were started by mpirun, .*OMPI_"),
        ("PMI_SIZE=4", "4 processes were started by mpirun, .*PMI_RANK"),
    ],
    indirect=["environment"],
)
@pytest.mark.usefixtures("environment")
def test_no_job_is_made_of_what_is_incomplete(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    with pytest.raises(CollectiveError, match=told):
        Collectives().init(10.0)
