"""Memory counters of the CPU backend: the kernel's, with a fallback where it keeps none."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accelz_cpu import memory
from accelz_cpu.memory import ProcessMemory

MIB = 1 << 20


def test_the_limit_of_a_control_group_is_the_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    machine = ProcessMemory().stats().capacity
    limit.write_text("max\n")
    assert ProcessMemory().stats().capacity == machine
    limit.write_text(f"{512 * MIB}\n")
    stats = ProcessMemory().stats()
    assert stats.capacity == 512 * MIB
    assert stats.free <= max(512 * MIB - stats.allocated, 0)


def test_what_other_processes_of_a_control_group_have_is_not_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    limit = ProcessMemory().stats().allocated + 1000 * MIB
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{limit - 100 * MIB}\n")
    assert ProcessMemory().stats().free <= 100 * MIB
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {300 * MIB}\n")
    assert 100 * MIB < ProcessMemory().stats().free <= 400 * MIB


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize(
    ("line", "root", "files"),
    [("0::/system.slice/job.scope", "", V2), ("7:memory:/system.slice/job.scope", "memory", V1)],
)
def test_the_process_is_in_a_group_below_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, root: str, files: tuple[str, str, str]
) -> None:
    """A step of Slurm, a scope of systemd: the tightest limit of all groups around it holds."""
    limit, taken, dropped = files
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(f"9:cpu,cpuacct:/elsewhere\n{line}\n")
    outer = tmp_path / "cgroup" / root / "system.slice"
    own = outer / "job.scope"
    own.mkdir(parents=True)
    base = ProcessMemory().stats().allocated
    (own / limit).write_text(f"{base + 900 * MIB}\n")
    (own / taken).write_text(f"{base + 700 * MIB}\n")
    (own / "memory.stat").write_text(f"{dropped} {100 * MIB}\n")
    stats = ProcessMemory().stats()
    assert (stats.capacity, stats.free) == (base + 900 * MIB, 300 * MIB)
    (outer / limit).write_text(f"{base + 800 * MIB}\n")
    (outer / taken).write_text(f"{base + 750 * MIB}\n")
    stats = ProcessMemory().stats()
    assert (stats.capacity, stats.free) == (base + 800 * MIB, 50 * MIB)


def test_without_a_kernel_peak_the_largest_value_seen_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "absent")
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "absent")
    counters = ProcessMemory()
    gc.collect()  # of earlier tests: or the block's memory comes in place of what goes meanwhile
    counters.trim()
    before = counters.stats().allocated
    block = torch.ones(512 * MIB, dtype=torch.uint8)
    counters.stats()
    del block
    counters.trim()
    assert counters.stats().peak >= before + 256 * MIB  # the kernel may take back what others have left cold
    counters.reset_peak()
    assert counters.stats().peak < before + 128 * MIB


_REUSE = """
import resource
import torch
import accelz

memory = accelz.use("cpu").memory
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def touch():
    torch.ones(100 << 20, dtype=torch.uint8)
for _ in range(12):  # glibc asks for a little more than it will use, and finds room for that after a few
    touch()
again = []
for _ in range(4):
    before = faults()
    touch()
    again.append(faults() - before)
held = memory.stats().allocated
memory.trim()
print(min(again), held - memory.stats().allocated)
"""


@pytest.mark.slow
def test_freed_memory_is_kept_for_reuse_until_it_is_trimmed() -> None:
    done = subprocess.run([sys.executable, "-c", _REUSE], capture_output=True, text=True, check=True)
    faults, given_back = map(int, done.stdout.split())
    assert faults < 1000, "100 MiB in fresh pages are 25,600"
    assert given_back > 90 * MIB
