"""examples/launch: the Slurm script starts torchrun, with what Slurm would set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # starts programs

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "launch" / "slurm.sbatch"
STUBS = {
    "scontrol": '#!/bin/bash\n[ "$*" = "show hostnames a[1-2]" ] && printf "localhost\\nlocalhost\\n"\n',
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do echo "srun $1"; shift; done\nexec "$@"\n',
    "torchrun": f'#!/bin/bash\necho "torchrun $*"\nexec {sys.executable} -m torch.distributed.run "$@"\n',
}
SAY = """
import os, sys
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {sys.argv[1:]}\\n", end="")
"""


def test_slurm_starts_a_process_for_each_gpu(tmp_path: Path) -> None:
    for name, content in STUBS.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text(SAY)
    slurm = {
        "SLURM_JOB_ID": str(1000000 + os.getpid()),
        "SLURM_JOB_NODELIST": "a[1-2]",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_PER_TASK": "6",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path / "train.py"), "--lr", "1"],
        check=False, env=os.environ | slurm, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert {"rank 0 of 2: ['--lr', '1']", "rank 1 of 2: ['--lr', '1']"} <= {*said}
    assert {"srun --kill-on-bad-exit=1", "srun --cpus-per-task=6"} <= {*said}
    (started,) = (line for line in said if line.startswith("torchrun"))
    assert f"--rdzv-id {slurm['SLURM_JOB_ID']}.0 " in started
    assert "--rdzv-endpoint localhost:2" in started


def test_the_script_has_no_errors_of_syntax() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=20)
