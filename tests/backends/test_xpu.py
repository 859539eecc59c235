"""accelz-xpu on a contract double of torch.xpu. No Intel GPU has run any of this."""

from __future__ import annotations

import inspect
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from accelz import BackendUnavailableError

from .doubles.bodies import Bodies, keep_the_device
from .doubles.machine import Machine, intel_gpu

pytestmark = pytest.mark.slow  # starts programs

ONE, TWO = {"DOUBLE_DEVICES": "1"}, {"DOUBLE_DEVICES": "2"}
on_xpu = Bodies()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return intel_gpu(tmp_path_factory.mktemp("xpu"))


@pytest.fixture(scope="module")
def outcomes(machine: Machine) -> dict[str, str]:
    return on_xpu.run(machine, __name__)


def load() -> Any:
    import accelz

    return accelz.use("xpu")


def double() -> Any:
    import xpu_double  # type: ignore[import-not-found]

    return xpu_double


@on_xpu()
def test_the_double_has_the_signatures_of_torch_xpu() -> None:
    """What the double accepts, torch.xpu accepts: the same names, in the same places."""
    for name in double().OFFERED:
        offered, real = (
            inspect.signature(f).parameters for f in (vars(double())[name], double().original[name])
        )
        if "kwargs" not in real:
            assert list(offered) == list(real)[: len(offered)], name  # torch 2.15 has one more of Event
        else:
            assert all(key in real for key in offered), name


@on_xpu(**TWO)
def test_no_device_is_touched_before_bind() -> None:
    accelerator = load()
    assert double().taken == []
    accelerator.bind(1)
    assert double().taken == [1]
    assert accelerator.device == torch.device("xpu", 1)
    with pytest.raises(BackendUnavailableError, match=r"local rank 2 .*sees 2"):
        accelerator.bind(2)


@on_xpu(DOUBLE_DEVICES="0", ZE_AFFINITY_MASK="7")
def test_a_mask_that_leaves_no_device_is_named() -> None:
    accelerator = load()
    with pytest.raises(BackendUnavailableError, match=r"sees no device .*ZE_AFFINITY_MASK=7.*sycl-ls"):
        accelerator.bind(0)


@on_xpu(**ONE)
def test_capabilities() -> None:
    flags = {name for name, declared in load().capabilities.flags().items() if declared}
    assert flags - {"profiler_ranges"} == {
        "asynchronous", "streams", "pinned_host_memory", "storage_resize", "host_data_assignment",
        "async_collectives", "exact_memory",
    }  # fmt: skip


@on_xpu()
def test_profiler_ranges_are_tasks_of_itt() -> None:
    from torch.profiler import itt

    accelerator, seen = load(), []
    assert accelerator.capabilities.profiler_ranges == itt.is_available()
    with (
        patch.object(itt, "range_push", seen.append),
        patch.object(itt, "range_pop", lambda: seen.append("popped")),
        pytest.raises(KeyError),
        accelerator.profiler_range("{0} layers.3"),
    ):
        raise KeyError
    assert seen == ["{0} layers.3", "popped"]


@on_xpu(**ONE)
def test_memory_counters() -> None:
    stats = load().memory.stats()
    assert (stats.allocated >> 30, stats.peak >> 30, stats.capacity >> 30) == (3, 5, 16)
    assert stats.free >> 30 == 11  # what the driver has, and what the allocator keeps unused


@on_xpu(**ONE, DOUBLE_FREE_MEMORY="unknown")
def test_a_device_that_does_not_tell_its_free_memory() -> None:
    memory = load().memory
    with pytest.warns(UserWarning, match="does not report its free memory"):
        stats = memory.stats()
    assert (stats.capacity >> 30, stats.free >> 30) == (16, 13)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert memory.stats() == stats  # said once


@on_xpu(**ONE)
def test_host_memory_is_page_locked() -> None:
    host = load().memory.empty_host((3, 2), torch.bfloat16)
    assert (host.shape, host.dtype, double().mode.dropped) == ((3, 2), torch.bfloat16, {"pin_memory": 1})


@on_xpu(**ONE)
def test_streams_and_events() -> None:
    streams = load().streams
    side = streams.new(priority=-1)
    assert side.native.priority == -1
    earlier = streams.current().record()
    side.wait(earlier)
    assert side.native.waited == [earlier.native]
    with streams.use(side):
        later = streams.current().record()
    assert later.native.stream is side.native
    assert 0 <= later.seconds_since(earlier) < 1
    streams.synchronize()


@on_xpu(**ONE)
def test_random_numbers() -> None:
    rng = load().rng
    rng.seed(7)
    state = rng.get_state()
    first = torch.randn(5, device="xpu")
    rng.set_state(state)
    assert torch.equal(torch.randn(5, device="xpu"), first)


@on_xpu(**ONE)
def test_parameters_wait_on_the_host() -> None:
    accelerator = load()
    accelerator.bind(0)
    from accelz import Slot, StorageSwap

    assert type(accelerator.flat_buffers) is StorageSwap
    parameter = nn.Parameter(torch.arange(4.0))
    buffer = accelerator.flat_buffers.flatten([parameter], [Slot(0, (4,), (1,), 4)], 4, torch.float32)
    buffer.release()
    buffer.materialize()
    buffer.data.copy_(torch.arange(4.0))
    assert parameter.tolist() == [0, 1, 2, 3]


@on_xpu(**ONE)
def test_xccl_serves_the_device_and_gloo_the_host() -> None:
    from torch.distributed.distributed_c10d import Backend, BackendConfig

    backends = BackendConfig(Backend(load().collectives.spec)).device_backend_map
    assert backends == {"cpu": "gloo", "xpu": "xccl"}


# -- intel-extension-for-pytorch -------------------------------------------------------------------


def extension(source: str) -> None:
    """Put an extension with this source into the process."""
    import tempfile

    folder = Path(tempfile.mkdtemp())
    (folder / "intel_extension_for_pytorch.py").write_text(source)
    sys.path.insert(0, str(folder))


@on_xpu(**ONE)
def test_an_extension_that_imports_is_used() -> None:
    extension("import torch\ntorch.extension_is_here = True\n")
    load()
    assert torch.extension_is_here  # type: ignore[attr-defined]


@on_xpu(**ONE)
def test_an_extension_that_does_not_fit_is_reported_and_left_alone() -> None:
    for source, why in {
        "import os\nos.exit(127)": "AttributeError: module 'os' has no attribute 'exit'",
        "import sys\nsys.exit(127)": "SystemExit: 127",
        "assert False, 'made for torch 2.8'": "AssertionError: made for torch 2.8",
    }.items():
        extension(source)
        from accelz_xpu.ipex import use_ipex

        with pytest.warns(UserWarning, match=f"installed but not used: {why}"):
            assert not use_ipex()
    load()


@on_xpu(**ONE)
def test_no_extension_is_no_word() -> None:
    from accelz_xpu.ipex import use_ipex

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not use_ipex()


# -- the engine ------------------------------------------------------------------------------------


@on_xpu(**ONE)
def test_the_engine_trains() -> None:
    """Eager, with state on the device and with state on the host: the losses of plain torch."""
    import zero

    keep_the_device()
    load().bind(0)
    for offload in (None, zero.Offload(optimizer="host", params="host")):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        model.load_state_dict(plain.state_dict())
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        config = zero.Config(stage=3, offload=offload)
        engine = zero.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config)
        for batch in torch.randn(4, 4, 8):
            want = plain(batch).square().mean()
            want.backward()
            optimizer.step()
            optimizer.zero_grad()
            ours = engine(batch.to("xpu")).square().mean()
            engine.backward(ours)
            engine.step()
            torch.testing.assert_close(ours.cpu(), want, rtol=1e-5, atol=0)


# -- the kit ---------------------------------------------------------------------------------------


def test_the_kit_runs_on_the_double(machine: Machine) -> None:
    """What needs no tensor that says it is on xpu: the descriptor, the random numbers, one kernel."""
    what = "test_reading_it or forked or child or role or declared or Rng or (adamw and not offset)"
    done = machine.run("-m", "accelz.cli", "check", "xpu", "-k", what, **ONE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_accelz_list_takes_the_device(machine: Machine) -> None:
    done = machine.run("-m", "accelz.cli", "list", "--json", **ONE)
    assert '"reason": "renderD128, torch 2.13.0+xpu"' in done.stdout
    assert '"selected": "xpu"' in done.stdout


def test_accelz_check_says_why_there_is_nothing_to_check(tmp_path: Path) -> None:
    machine = intel_gpu(tmp_path)
    machine.write("sys/class/drm/renderD128/device/vendor", "0x10de\n")
    done = machine.run("-m", "accelz.cli", "check", "xpu")
    assert done.returncode == 2
    assert "'xpu' cannot be tested here: no Intel GPU: no render node in /sys/class/drm" in done.stderr
