"""The disk tier's file: bytes moved, what goes wrong with it, what is left of it."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.test_parity import fresh, language_loss
from tests.zero.training import adamw
from zero.host_memory import bytes_of
from zero.tiers import swap_file
from zero.tiers.split import LOWER, SplitMaster
from zero.tiers.swap_file import PAGE, Section, SwapFile, aligned

WIDTH, LAYERS = 128, 4
LAYER = WIDTH * WIDTH


def layers(steps: int, **settings: Any) -> zero.Engine:
    """An engine of four layers whose records are whole pages, after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    config = zero.Config(precision="bf16", timeout=20, units=("Linear",), **settings)
    engine = zero.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    for _ in range(steps):
        x = torch.ones(2, WIDTH, device=engine.accelerator.device)
        engine.backward(engine(x).float().square().mean())
        engine.step()
    return engine


def bytes_body(context: Context, path: str, budget: int, compact: bool) -> tuple[int, int]:
    offload = zero.Offload(optimizer="disk", path=path, host_budget=budget, compact=compact)
    engine = layers(1, offload=offload)
    file = engine._stores.swap_file
    before = file.bytes_read + file.bytes_written, _kernel_io()
    for _ in range(3):
        x = torch.ones(2, WIDTH, device=engine.accelerator.device)
        engine.backward(engine(x).float().square().mean())
        engine.step()
    return file.bytes_read + file.bytes_written - before[0], _kernel_io() - before[1]


def _kernel_io() -> int:
    """Bytes that this process has asked the kernel to read and write."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]) + int(lines["wchar"])


@pytest.mark.parametrize(("moved", "compact"), [(24, False), (20, True)])
@pytest.mark.parametrize("cached", [0, 1, 3])
def test_a_step_moves_so_many_bytes_per_parameter(
    cluster: Clusters, tmp_path: Path, device: str, cached: int, moved: int, compact: bool
) -> None:
    """Half read, half written, no gradient among them; records in the host's budget are not moved at all."""
    arguments = {"path": str(tmp_path), "budget": cached * 12 * LAYER // 2, "compact": compact}
    for counted, seen in cluster(2).run(bytes_body, **arguments):
        assert counted == 3 * moved * (LAYERS - cached) * LAYER // 2
        assert counted <= seen
        assert seen < counted + 100_000 or device != "cpu"  # where the ranks' messages do not count


def resume_body(context: Context, path: str, tiers: list[zero.Offload | None]) -> list[list[float]]:
    """Losses of one run without interruption, and of one that is saved and resumed in other tiers."""
    runs = []
    for first, second in ((None, None), *itertools.pairwise(tiers)):
        losses = []
        engine = None
        for part, offload in enumerate((first, second)):
            config = zero.Config(precision="bf16", clip_norm=1.0, offload=offload, timeout=20)
            engine = zero.initialize(model := fresh(), adamw(model), config)
            if part:
                engine.load_checkpoint(path)
            for step in range(2 * part, 2 * part + 2):
                loss = language_loss(model, step, context.rank)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            engine.save_checkpoint(Path(path, f"part-{part}"), async_=bool(part))
            engine.wait_for_checkpoint()
        runs.append(losses)
    return runs


def test_resume_in_any_tier_is_exact(cluster: Clusters, tmp_path: Path, device: str) -> None:
    disk = zero.Offload(optimizer="disk", path=tmp_path)
    everything = zero.Offload(optimizer="disk", params="disk", gradients="disk", path=tmp_path)
    compact = zero.Offload(optimizer="disk", path=tmp_path, compact=True)
    tiers = [disk, compact, zero.Offload(optimizer="host", params="host"), everything, None, disk]
    for reference, *others in cluster(2).run(resume_body, path=str(tmp_path), tiers=tiers, limit=120):
        for losses in others:
            assert losses == reference or device != "cpu"
            assert losses == pytest.approx(reference, rel=2e-2)


def values_body(context: Context, path: str, precision: Any) -> bool:
    """Whole values, their change from outside, and optimizer state, with everything on disk."""
    everything = zero.Offload(
        optimizer="disk", params="disk", gradients="disk", path=path, compact=precision == "bf16"
    )
    config = zero.Config(timeout=20, offload=everything, precision=precision)
    engine = zero.initialize(model := fresh(), adamw(model), config)
    engine.backward(language_loss(model, 0, context.rank))
    gradient = engine.full_gradient("blocks.0.up.weight")
    engine.step()
    moment = engine.full_optimizer_state("blocks.0.up.weight")["exp_avg"]
    with zero.gathered(model.blocks[0].up.weight, write_rank=0), torch.no_grad():
        model.blocks[0].up.weight.fill_(0.25)
    state = engine.state_dict(master=True)
    engine.load_state_dict(state)
    again = engine.state_dict(master=True)
    full = engine.full_master("blocks.0.up.weight")
    same = all(torch.equal(value, again[name]) for name, value in state.items())
    assert gradient is not None
    return same and bool((full == 0.25).all()) and bool(torch.allclose(moment, 0.1 * gradient, rtol=1e-2))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_values_on_disk_are_read_and_changed(cluster: Clusters, tmp_path: Path, precision: str) -> None:
    assert all(cluster(2).run(values_body, path=str(tmp_path), precision=precision))


# -- the file by itself --------------------------------------------------------------------------------


def test_the_file_is_private_and_has_no_name(tmp_path: Path) -> None:
    file = SwapFile(tmp_path)
    assert os.listdir(tmp_path) == []
    assert stat.S_IMODE(os.fstat(file._cached).st_mode) == 0o600
    file.close()


def test_files_of_killed_jobs_are_swept_away(tmp_path: Path) -> None:
    """Killed between making its file and unlinking it, a job leaves an empty one; nothing else is touched."""
    for name, content, age in (("old", "", 100), ("young", "", 0), ("full", "data", 100)):
        path = tmp_path / f".zero-swap-{name}"
        path.write_text(content)
        os.utime(path, (time.time() - age, time.time() - age))
    SwapFile(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == [".zero-swap-full", ".zero-swap-young"]


def test_sections_and_slices_see_the_same_bytes(tmp_path: Path) -> None:
    file = SwapFile(tmp_path)
    stored = Section(file, file.allocate(3 * PAGE), 3 * PAGE // 4, torch.float32)
    assert not stored.read().any()  # zero at first
    stored[10:2000].write(torch.arange(10.0, 2000.0))
    buffer = aligned(torch.empty(4 * PAGE, dtype=torch.uint8))[: 3 * PAGE]
    file.read(stored.place, bytes_of(buffer)).wait()
    values = buffer.view(torch.float32)
    assert torch.equal(values[10:2000], torch.arange(10.0, 2000.0))
    values.add_(1)
    file.write(stored.place, bytes_of(buffer)).wait()
    assert torch.equal(stored.read(), values)
    assert torch.equal(stored[5:30][6:8].read(), values[11:13])


def test_a_split_master_is_its_halves_bit_for_bit(tmp_path: Path) -> None:
    """Every upper half (with all ties and neighbours of ties), and slices of them."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    bits = torch.cat([upper | lower for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = bits.view(torch.float32)
    values = values[~values.isnan()].contiguous()
    file = SwapFile(tmp_path)
    lower = Section(file, file.allocate(2 * values.numel()), values.numel(), LOWER)
    weights = values.to(torch.bfloat16)
    master = SplitMaster(lambda: weights, lower)
    master.write(values)
    assert torch.equal(master.read().view(torch.int32), values.view(torch.int32))
    part = master[1000:300_000][5:200_000]
    assert torch.equal(part.read().view(torch.int32), values[1005:201_000].view(torch.int32))
    part.write(torch.full((199_995,), 1.00390625))  # a tie that is rounded down: its upper half is even
    values[1005:201_000] = 1.00390625
    assert torch.equal(master.read().view(torch.int32), values.view(torch.int32))
    part.write(torch.full((199_995,), 1.01171875))  # and one that is rounded up
    values[1005:201_000] = 1.01171875
    assert torch.equal(master.read().view(torch.int32), values.view(torch.int32))


def test_a_place_that_does_not_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zero.OffloadError, match="no file can be made there: No such file"):
        SwapFile(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(zero.OffloadError, match="Not a directory"):
        SwapFile(tmp_path / "file")


def test_a_full_disk_says_so_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = SwapFile(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(zero.OffloadError, match=r"no room for 8192 more bytes .*No space left.*Free space"):
        file.allocate(5000)


@contextmanager
def broken_disk(after: int) -> Iterator[None]:
    """Reads and writes of the swap file fail, `after` more of them."""
    count = 0
    sound = os.preadv

    def read(descriptor: int, buffers: Any, place: int) -> int:
        nonlocal count
        count += 1
        if count > after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return sound(descriptor, buffers, place)

    os.preadv = read
    try:
        yield
    finally:
        os.preadv = sound


def read_error_body(context: Context, path: str) -> list[str]:
    """A disk that fails in the second record: the step says so, and a checkpoint heals the engine."""
    engine = layers(1, offload=zero.Offload(optimizer="disk", path=path))
    engine.save_checkpoint(Path(path, "sound"))
    before = engine.state_dict(master=True)
    x = torch.ones(2, WIDTH, device=engine.accelerator.device)
    messages = []
    engine.backward(engine(x).float().square().mean())
    with broken_disk(after=1), pytest.raises(zero.OffloadError) as failed:
        engine.step()
    messages.append(str(failed.value))
    with pytest.raises(zero.UsageError) as refused:
        engine.backward(engine(x).float().square().mean())
    messages.append(str(refused.value))
    engine.load_checkpoint(path)
    after = engine.state_dict(master=True)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    engine.backward(engine(x).float().square().mean())
    engine.step()
    return messages


def test_a_read_error_is_told_and_healed(cluster: Clusters, tmp_path: Path) -> None:
    for told, refused in cluster(2).run(read_error_body, path=str(tmp_path)):
        assert "could not be read from the disk" in told
        assert "Input/output error" in told
        assert "restore a checkpoint" in refused


def kernel_error_body(context: Context, path: str) -> tuple[bool, bool]:
    """A step that fails in memory, at the third record: nothing may be under way when it is told."""
    engine = layers(1, offload=zero.Offload(optimizer="disk", path=path))
    engine.save_checkpoint(Path(path, "sound"))
    before = engine.state_dict(master=True)
    x = torch.ones(2, WIDTH, device=engine.accelerator.device)
    engine.backward(engine(x).float().square().mean())
    records = iter(range(LAYERS))
    sound = engine._shards._step_group

    def fail(*arguments: Any) -> None:
        if next(records) == 2:
            raise RuntimeError("a kernel that fails")
        sound(*arguments)

    engine._shards._step_group = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a kernel that fails"):
        engine.step()
    quiet = not any(engine._stores.pipeline._writes)
    engine._shards._step_group = sound  # type: ignore[method-assign]
    engine.load_checkpoint(path)
    after = engine.state_dict(master=True)
    return quiet, all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_step_that_fails_leaves_nothing_under_way(cluster: Clusters, tmp_path: Path) -> None:
    for quiet, healed in cluster(2).run(kernel_error_body, path=str(tmp_path)):
        assert quiet
        assert healed


def test_blocks_of_a_section_are_moved_in_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_file, "BLOCK", PAGE)
    file = SwapFile(tmp_path)
    place = file.allocate(64 * PAGE)
    buffer = aligned(torch.arange(65 * PAGE // 8).view(torch.uint8))[: 64 * PAGE]
    file.write(place, bytes_of(buffer)).wait()
    back = aligned(torch.empty(65 * PAGE, dtype=torch.uint8))[: 64 * PAGE]
    file.read(place, bytes_of(back)).wait()
    assert torch.equal(back, buffer)
