"""The disk tier's file: bytes moved, what goes wrong with it, what is left of it."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

import zero
from accelz.conformance.cluster import Clusters, Context
from accelz.updates import REMAINDER
from tests.zero.helpers.disks import broken_disk
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.models import fresh, language_loss
from tests.zero.helpers.training import adamw
from zero.tiers import swap_file
from zero.tiers.split_master import SplitMaster
from zero.tiers.swap_file import PAGE, Section, SwapFile, page_aligned_part
from zero.tiers.tier import ON_DISK, Record
from zero.tiers.values import bytes_of

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
        train_on(engine, engine(x).float().square().mean())
    return engine


def bytes_body(context: Context, path: str, budget: int, masters: str) -> tuple[int, int]:
    offload = zero.Offload(optimizer="disk", path=path, host_budget=budget)
    engine = layers(1, offload=offload, masters=masters)
    file = engine._boundary.stores.swap_file(ON_DISK)
    before = file.bytes_read + file.bytes_written, _kernel_io()
    for _ in range(3):
        x = torch.ones(2, WIDTH, device=engine.accelerator.device)
        train_on(engine, engine(x).float().square().mean())
    return file.bytes_read + file.bytes_written - before[0], _kernel_io() - before[1]


def _kernel_io() -> int:
    """Bytes that this process has asked the kernel to read and write."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]) + int(lines["wchar"])


@pytest.mark.parametrize(("moved", "masters"), [(24, "fp32"), (20, "split")])
@pytest.mark.parametrize("cached", [0, 1, 3])
def test_a_step_moves_so_many_bytes_per_parameter(
    cluster: Clusters, tmp_path: Path, device: str, cached: int, moved: int, masters: str
) -> None:
    """Half read, half written, no gradient among them; records in the host's budget are not moved at all."""
    arguments = {"path": str(tmp_path), "budget": cached * moved // 2 * LAYER // 2, "masters": masters}
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
                train_on(engine, loss)
                losses.append(loss.item())
            engine.save_checkpoint(Path(path, f"part-{part}"), async_=bool(part))
            engine.wait_for_checkpoint()
        runs.append(losses)
    return runs


def test_resume_in_any_tier_is_exact(cluster: Clusters, tmp_path: Path, device: str) -> None:
    disk = zero.Offload(optimizer="disk", path=tmp_path)
    everything = zero.Offload(optimizer="disk", params="disk", gradients="disk", path=tmp_path)
    small = zero.Offload(optimizer="disk", path=tmp_path, sub_group_size=64, host_budget=5000)
    tiers = [disk, zero.Offload(optimizer="host", params="host"), everything, None, small, disk]
    for reference, *others in cluster(2).run(resume_body, path=str(tmp_path), tiers=tiers, limit=120):
        for losses in others:
            assert losses == reference or device != "cpu"
            assert losses == pytest.approx(reference, rel=2e-2)


def values_body(context: Context, path: str, precision: Any, sub_group_size: int) -> bool:
    """Whole values, their change from outside, and optimizer state, with everything on disk."""
    everything = zero.Offload(
        optimizer="disk",
        params="disk",
        gradients="disk",
        path=path,
        sub_group_size=sub_group_size,
    )
    masters: Any = "split" if precision == "bf16" else "fp32"
    config = zero.Config(timeout=20, offload=everything, precision=precision, masters=masters)
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


@pytest.mark.parametrize("sub_group_size", [64, 1 << 24])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_values_on_disk_are_read_and_changed(
    cluster: Clusters, tmp_path: Path, precision: str, sub_group_size: int
) -> None:
    arguments = {"path": str(tmp_path), "precision": precision, "sub_group_size": sub_group_size}
    assert all(cluster(2).run(values_body, **arguments))


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
    buffer = page_aligned_part(torch.empty(4 * PAGE, dtype=torch.uint8))[: 3 * PAGE]
    file.read(stored.place, bytes_of(buffer)).wait()
    values = buffer.view(torch.float32)
    assert torch.equal(values[10:2000], torch.arange(10.0, 2000.0))
    values.add_(1)
    file.write(stored.place, bytes_of(buffer)).wait()
    assert torch.equal(stored.read(), values)
    assert torch.equal(stored[5:30][6:8].read(), values[11:13])


def test_a_split_master_is_its_halves(tmp_path: Path) -> None:
    """Every upper half (with all ties and neighbours of ties), and slices of them, on disk and in memory."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    bits = torch.cat([upper | lower for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = bits.view(torch.float32)
    values = values[~values.isnan()].contiguous()
    file, numel = SwapFile(tmp_path), values.numel()
    rest = Section(file, file.allocate(2 * numel), numel, REMAINDER)
    weights = torch.zeros(numel, dtype=torch.bfloat16)
    for where in (rest, torch.zeros(numel, dtype=REMAINDER)):
        master = SplitMaster(lambda: weights, where)
        master.write(values)
        assert torch.equal(weights, values.bfloat16())
        want = values.view(torch.int32) - (values.view(torch.int32) & 0x1FFFF).eq(0x8000).int()
        assert torch.equal(master.read().view(torch.int32), want)
        part = master[1000:300_000][5:200_000]
        assert torch.equal(part.read().view(torch.int32), want[1005:201_000])
        part.write(torch.full((199_995,), 1.01171875))  # a tie that is rounded up
        assert bool((part.read() == 1.01171875).all())
        assert torch.equal(master.read()[201_000:].view(torch.int32), want[201_000:])


def test_a_file_system_that_wants_larger_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens any file around the cache, and then refuses pages of this size."""
    write = os.pwrite

    def picky(descriptor: int, data: Any, place: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", picky)
    file = SwapFile(tmp_path)
    assert not file.past_cache
    file.close()
    monkeypatch.undo()
    file = SwapFile(tmp_path)
    assert file.past_cache
    file.close()


def test_a_place_that_does_not_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zero.OffloadError, match="no file can be created there: No such file"):
        SwapFile(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(zero.OffloadError, match="Not a directory"):
        SwapFile(tmp_path / "file")


def test_a_full_disk_says_so_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = SwapFile(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(zero.OffloadError, match=r"no space for 8,192 more bytes .*No space left.*Free space"):
        file.allocate(5000)


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
    train_on(engine, engine(x).float().square().mean())
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
    sound = engine._boundary.optimizer._step_sub_group

    def fail(*arguments: Any) -> None:
        if next(records) == 2:
            raise RuntimeError("a kernel that fails")
        sound(*arguments)

    engine._boundary.optimizer._step_sub_group = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a kernel that fails"):
        engine.step()
    quiet = not any(engine._boundary.stores.pipeline._writes)
    engine._boundary.optimizer._step_sub_group = sound  # type: ignore[method-assign]
    engine.load_checkpoint(path)
    after = engine.state_dict(master=True)
    return quiet, all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_step_that_fails_leaves_nothing_under_way(cluster: Clusters, tmp_path: Path) -> None:
    for quiet, healed in cluster(2).run(kernel_error_body, path=str(tmp_path)):
        assert quiet
        assert healed


class Gates:
    """Reads and writes of records, by number, that wait until the test lets them go on. stuck: those that it
    has not."""

    def __init__(self, records: list[Record]) -> None:
        self.stuck: list[tuple[str, int]] = []
        moves = [(move, number) for move in ("read", "write") for number in range(-1, len(records) + 1)]
        self._open, self._begun, self._done = ({key: Event() for key in moves} for _ in range(3))
        self._number = {record.sections[0].place: n for n, record in enumerate(records)}

    def open(self, move: str, number: int) -> None:
        self._open[move, number].set()

    def under_way(self, move: str, number: int) -> bool:
        return self._begun[move, number].wait(PATIENCE) and not self._done[move, number].is_set()

    @contextmanager
    def around_the_disk(self) -> Iterator[None]:
        sound = os.preadv, os.pwritev
        os.preadv, os.pwritev = self._gated("read", os.preadv), self._gated("write", os.pwritev)
        try:
            yield
        finally:
            os.preadv, os.pwritev = sound

    def _gated(self, move: str, sound: Callable[..., int]) -> Callable[..., int]:
        def gated(descriptor: int, buffers: Any, place: int) -> int:
            key = move, self._number[place]
            self._begun[key].set()
            if not self._open[key].wait(PATIENCE):
                self.stuck.append(key)
            moved = sound(descriptor, buffers, place)
            self._done[key].set()
            return moved

        return gated


PATIENCE = 5.0  # seconds


def stages_body(context: Context, path: str) -> tuple[list[str], list[tuple[str, int]], bool]:
    """While a record is stepped, the next one is being read and the one before it written."""
    engine, plain = (layers(1, offload=o) for o in (zero.Offload(optimizer="disk", path=path), None))
    for each in (engine, plain):
        x = torch.ones(2, WIDTH, device=each.accelerator.device)
        each.backward(each(x).float().square().mean())
    groups = [g for u in engine.units for g in u.groups]
    subs = [s for g in groups for s in g.subs]
    gates, wrong, sound = Gates([s.record for s in subs]), [], engine._boundary.optimizer._step_sub_group

    def step(owned: Any, *arguments: Any) -> None:
        now = subs.index(owned.sub)
        for move, number in (("read", now + 1), ("write", now - 1)):
            if 0 <= number < LAYERS and not gates.under_way(move, number):
                wrong.append(f"{move} {number} is not under way while {now} is stepped")
        sound(owned, *arguments)
        gates.open("read", now + 1)
        gates.open("write", now - 1)

    engine._boundary.optimizer._step_sub_group = step  # type: ignore[method-assign]
    gates.open("read", 0)
    gates.open("write", LAYERS - 1)
    with gates.around_the_disk():
        engine.step()
    plain.step()
    mine, theirs = (each.state_dict(master=True) for each in (engine, plain))
    same = all(torch.equal(value, theirs[name]) for name, value in mine.items())
    return wrong, gates.stuck, same or context.accelerator.device.type != "cpu"


def test_reading_stepping_and_writing_overlap(cluster: Clusters, tmp_path: Path) -> None:
    for wrong, stuck, same in cluster(1).run(stages_body, path=str(tmp_path), limit=90):
        assert wrong == []
        assert stuck == []
        assert same


def removed_body(context: Context, path: str) -> tuple[list[float], list[float]]:
    """The directory goes in the middle of a run, which goes on as if nothing had been."""
    runs = []
    for removed in (False, True):
        folder = Path(path, f"swap-{context.rank}-{removed}")
        folder.mkdir()
        offload = zero.Offload(optimizer="disk", params="disk", gradients="disk", path=folder)
        engine = zero.initialize(model := fresh(), adamw(model), zero.Config(timeout=20, offload=offload))
        losses = []
        for step in range(4):
            if removed and step == 2:
                folder.rmdir()
            loss = language_loss(model, step, context.rank)
            train_on(engine, loss)
            losses.append(loss.item())
        runs.append(losses)
    return runs[0], runs[1]


def test_a_directory_may_go_while_its_files_are_used(cluster: Clusters, tmp_path: Path) -> None:
    for there, gone in cluster(2).run(removed_body, path=str(tmp_path), limit=60):
        assert gone == there


def full_disk_body(context: Context, path: str) -> str:
    """A disk with room for two of four records: told before anything is trained, and left as it was."""
    sound = os.posix_fallocate

    def allocate(descriptor: int, place: int, nbytes: int) -> None:
        if place + nbytes > 2 * 12 * LAYER:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sound(descriptor, place, nbytes)

    os.posix_fallocate = allocate
    try:
        with pytest.raises(zero.OffloadError) as full:
            layers(0, offload=zero.Offload(optimizer="disk", path=path))
    finally:
        os.posix_fallocate = sound
    layers(1, offload=zero.Offload(optimizer="disk", path=path))  # once there is room
    return str(full.value)


def test_a_full_disk_stops_initialize_and_not_training(cluster: Clusters, tmp_path: Path) -> None:
    (told,) = cluster(1).run(full_disk_body, path=str(tmp_path))
    assert re.search(r"no space for [\d,]+ more bytes .*No space left on device\. Free space", told)
    assert os.listdir(tmp_path) == []


def locked_body(context: Context, path: str) -> tuple[bool, dict[str, list[bool]]]:
    """Whether what travels between device and host is page-locked there."""
    away = {
        "gradients": zero.Offload(optimizer="host"),
        "params": zero.Offload(params="host"),
        "records": zero.Offload(optimizer="host", step="device"),
        "buffers": zero.Offload(optimizer="disk", path=path),
    }
    found = {}
    for kind, offload in away.items():
        engine = layers(1, offload=offload)
        x = torch.ones(2, WIDTH, device=engine.accelerator.device)
        engine.backward(engine(x).float().square().mean())
        groups = [g for u in engine.units for g in u.groups]
        values = {
            "gradients": lambda e=engine: [g.slice.get() for g in e._reducer.all],
            "params": lambda g=groups: [each.shard for each in g],
            "records": lambda g=groups: [
                v for each in g for s in each.subs for v in (s.record.master, *s.record.moments)
            ],
            "buffers": lambda e=engine: e._boundary.stores.pipeline._buffers,
        }[kind]()
        found[kind] = [value.device.type == "cpu" and value.is_pinned() for value in values]
    return context.accelerator.capabilities.pinned_host_memory, found


def test_what_travels_is_page_locked(cluster: Clusters, tmp_path: Path) -> None:
    for pinned, found in cluster(2).run(locked_body, path=str(tmp_path), limit=60):
        for kind, locked in found.items():
            assert locked, kind
            assert all(locked) or not pinned, kind


def test_blocks_of_a_section_are_moved_in_parallel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_file, "TRANSFER_BLOCK", PAGE)
    file = SwapFile(tmp_path)
    place = file.allocate(64 * PAGE)
    buffer = page_aligned_part(torch.arange(65 * PAGE // 8).view(torch.uint8))[: 64 * PAGE]
    file.write(place, bytes_of(buffer)).wait()
    back = page_aligned_part(torch.empty(65 * PAGE, dtype=torch.uint8))[: 64 * PAGE]
    file.read(place, bytes_of(back)).wait()
    assert torch.equal(back, buffer)
