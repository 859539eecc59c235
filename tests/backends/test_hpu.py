"""accelz-hpu on the contract double of the vendor's bridge. No Gaudi has run any of this."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

from accelz import BackendError, BackendUnavailableError, CollectiveError, Slot
from accelz.discovery import installed

from .doubles.bodies import Bodies
from .doubles.bridge import LAZY, bound, load, module_held
from .doubles.machine import Machine, gaudi, gaudi_environment

pytestmark = pytest.mark.slow  # starts programs

on_gaudi = Bodies()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    if not installed("sim"):
        pytest.skip("the double computes on accelz-sim, which is not installed: make sim")
    return gaudi(tmp_path_factory.mktemp("gaudi"))


@pytest.fixture(scope="module")
def outcomes(machine: Machine) -> dict[str, str]:
    return on_gaudi.run(machine, __name__, **gaudi_environment(machine))


# -- loading ---------------------------------------------------------------------------------------


@on_gaudi()
def test_the_settings_are_made_before_the_import() -> None:
    load()
    from habana_frameworks.torch.utils import internal  # type: ignore[import-not-found]

    assert (os.environ["PT_HPU_LAZY_MODE"], os.environ["PT_HPU_WEIGHT_SHARING"]) == ("0", "0")
    assert not internal.is_lazy()


@on_gaudi(**LAZY, PT_HPU_WEIGHT_SHARING="1")
def test_the_users_mode_is_kept_and_weight_sharing_is_off() -> None:
    accelerator = load()
    assert accelerator.capabilities.lazy_graph
    assert not accelerator.capabilities.storage_resize
    import sys

    assert "habana_frameworks.torch.core.weight_sharing" not in sys.modules


@on_gaudi(PT_HPU_LAZY_MODE="0")
def test_a_bridge_that_torch_has_loaded_in_the_same_mode_is_taken() -> None:
    import habana_frameworks.torch  # type: ignore[import-not-found]  # noqa: F401

    assert not load().capabilities.lazy_graph


@on_gaudi(DOUBLE_TORCH_FORK="1")
def test_a_bridge_in_another_mode_is_refused() -> None:
    import habana_frameworks.torch  # noqa: F401 (lazy is its own default)

    with pytest.raises(BackendError, match=r"imported in lazy mode before .*set PT_HPU_LAZY_MODE=0"):
        load()


@on_gaudi(**LAZY)
def test_a_bridge_with_weight_sharing_is_refused() -> None:
    import habana_frameworks.torch  # noqa: F401

    with pytest.raises(BackendError, match=r"weight sharing.*PT_HPU_WEIGHT_SHARING=0"):
        load()


@on_gaudi(PT_HPU_LAZY_MODE="1")
def test_the_bridges_own_check_is_passed_on() -> None:
    with pytest.raises(BackendError, match=r"PT_HPU_LAZY_MODE=1: AssertionError: Stock PyTorch version"):
        load()


@on_gaudi(PT_HPU_LAZY_MODE="2")
def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(BackendError, match=r"PT_HPU_LAZY_MODE=2: expected 0 \(eager\) or 1 \(lazy\)"):
        load()


@on_gaudi()
def test_capabilities() -> None:
    flags = {name for name, declared in load().capabilities.flags().items() if declared}
    assert flags == {
        "asynchronous", "streams", "pinned_host_memory", "storage_resize", "async_collectives",
        "one_device_per_process",
    }  # fmt: skip


def test_a_process_with_the_bridge_loaded_by_torch_works(machine: Machine) -> None:
    script = """
        import sys, torch
        early = "habana_frameworks.torch" in sys.modules
        import accelz
        answer([early, accelz.use("hpu").name])
    """
    answer = machine.answer(script, PT_HPU_LAZY_MODE="0", **gaudi_environment(machine))
    assert answer == [True, "hpu"]


# -- one device per process ------------------------------------------------------------------------


@on_gaudi()
def test_no_device_is_touched_before_bind() -> None:
    accelerator = load()
    assert (accelerator.device_count(), module_held()) == (8, None)
    accelerator.bind(3)
    assert module_held() == 3
    assert accelerator.device == torch.device("hpu", 0)
    assert "HLS_MODULE_ID" not in os.environ  # a child process makes its own choice


@on_gaudi()
def test_a_process_keeps_its_device() -> None:
    accelerator = load()
    accelerator.bind(2)
    accelerator.bind(2)
    with pytest.raises(BackendError, match=r"holds the device of local rank 2 and cannot take that of 3"):
        accelerator.bind(3)
    assert module_held() == 2


@on_gaudi(HABANA_VISIBLE_MODULES="4,5,7")
def test_visible_modules_are_the_local_ranks_in_order() -> None:
    accelerator = load()
    assert accelerator.device_count() == 3
    with pytest.raises(BackendUnavailableError, match=r"local rank 3 .*sees 3.*HABANA_VISIBLE_MODULES"):
        accelerator.bind(3)
    accelerator.bind(2)
    assert module_held() == 7


@on_gaudi(LOCAL_RANK="1", RANK="1", WORLD_SIZE="2", HABANA_VISIBLE_MODULES="4,5")
def test_what_the_bridge_chose_under_torchrun_stays() -> None:
    accelerator = load()
    assert os.environ["HLS_MODULE_ID"] == "5"
    accelerator.bind(1)
    assert (module_held(), os.environ["HLS_MODULE_ID"]) == (5, "5")


@on_gaudi(DOUBLE_MODULES="0,1,2")
def test_without_a_list_a_smaller_server_serves_local_rank_0_alone() -> None:
    accelerator = load()
    with pytest.raises(BackendUnavailableError, match=r"local rank 1: As HABANA_VISIBLE_MODULES is not"):
        accelerator.bind(1)
    accelerator.bind(0)
    assert module_held() == 0


@on_gaudi(DOUBLE_MODULES="6")
def test_a_single_device_is_any_local_ranks() -> None:
    accelerator = load()
    accelerator.bind(5)
    assert module_held() == 6


@on_gaudi()
def test_a_device_that_is_taken_is_told() -> None:
    accelerator = load()
    accelerator.bind(1)
    child = os.fork()
    if child == 0:
        os._exit(_exit_code(_take_it_too))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _take_it_too() -> None:
    import habana_frameworks.torch.hpu as hpu

    hpu._held = None  # what a process that was started afresh knows
    accelerator = type(load())(__import__("accelz_hpu.bridge").bridge.import_bridge())
    with pytest.raises(BackendUnavailableError, match=r"Device acquire failed \(module 1\).*hl-smi"):
        accelerator.bind(1)
    accelerator.bind(0)


def _exit_code(call: Callable[[], None]) -> int:
    try:
        call()
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    return 0


# -- roles -----------------------------------------------------------------------------------------


@on_gaudi()
def test_memory_counters() -> None:
    memory = (accelerator := bound()).memory
    block = torch.ones(1 << 20, device=accelerator.device)
    stats = memory.stats()
    assert (stats.allocated, stats.peak, stats.capacity) == (4 << 20, 4 << 20, 2 << 30)
    assert stats.free == stats.capacity - stats.allocated
    memory.reset_peak()
    assert torch.get_device_module("hpu").memory_stats()["MaxInUse"] == 0
    assert memory.stats().peak == 4 << 20  # never below what is in use
    memory.trim()
    del block
    assert memory.stats().allocated == 0


@on_gaudi()
def test_streams_and_events() -> None:
    accelerator = bound()
    streams = accelerator.streams
    side = streams.new(priority=-1)
    values = torch.zeros(1000, device=accelerator.device)
    side.wait(streams.current().record())
    with streams.use(side):
        values += 1
        done = side.record()
    assert not done.done()
    streams.keep_alive(values, side)
    streams.current().wait(done)
    streams.synchronize()
    assert done.done()
    assert done.seconds_since(done) == 0
    assert values.sum().item() == 1000


@on_gaudi()
def test_random_numbers() -> None:
    rng = (accelerator := bound()).rng
    rng.seed(7)
    state = rng.get_state()
    first = torch.randn(5, device=accelerator.device).cpu()
    rng.set_state(state)
    assert torch.equal(torch.randn(5, device=accelerator.device).cpu(), first)


@on_gaudi()
def test_collectives_pass_only_arguments_that_the_bridge_takes() -> None:
    """Its init_process_group and new_group raise TypeError for others; hccl serves hpu and gloo the host."""
    from torch.distributed import ProcessGroupGloo

    collectives = bound().collectives
    world = collectives.init(10.0)
    again = collectives.new_group([0], 10.0)
    for group in (world, again):
        for kind in ("cpu", "hpu"):
            assert isinstance(group.process_group._get_backend(torch.device(kind)), ProcessGroupGloo)
        total = torch.ones(3)
        collectives.all_reduce(total, group)
        assert total.tolist() == [1, 1, 1]
    assert collectives.spec == "cpu:gloo,hpu:hccl"
    with pytest.raises(CollectiveError, match="'cpu:gloo,hpu:hccl' makes groups only where every rank"):
        collectives.new_group([0], 10.0, members_only=True)
    collectives.destroy()


@on_gaudi()
def test_flush_does_nothing_in_eager_mode() -> None:
    bound().flush()
    from habana_frameworks.torch import core

    assert core.steps == 0


@on_gaudi(**LAZY)
def test_flush_runs_what_was_recorded_in_lazy_mode() -> None:
    """Results are not there before mark_step, nor after it anything left to do."""
    accelerator = bound()
    from habana_frameworks.torch import core

    values = torch.ones(5, device=accelerator.device) * 3
    recorded = accelerator.streams.current().record()
    assert not recorded.done()
    accelerator.flush()
    assert recorded.done()
    assert core.steps == 1
    assert values.sum().item() == 15


@on_gaudi()
def test_flat_buffers_drop_their_bytes_in_eager_mode() -> None:
    accelerator = bound()
    parameter = nn.Parameter(torch.arange(1 << 20, dtype=torch.float32))
    before = accelerator.memory.stats().allocated
    slot = Slot(0, tuple(parameter.shape), (1,), parameter.numel())
    buffer = accelerator.flat_buffers.flatten([parameter], [slot], parameter.numel(), torch.float32)
    values = buffer.data.cpu()
    buffer.release()
    assert accelerator.memory.stats().allocated == before
    buffer.materialize()
    buffer.data.copy_(values)
    assert torch.equal(parameter.detach().cpu(), torch.arange(1 << 20, dtype=torch.float32))


@on_gaudi(**LAZY)
def test_flat_buffers_say_what_lazy_mode_lacks_and_change_nothing() -> None:
    accelerator = bound()
    parameter = nn.Parameter(torch.arange(4.0, device=accelerator.device))
    with pytest.raises(BackendError, match=r"lazy mode cannot drop.*set PT_HPU_LAZY_MODE=0"):
        accelerator.flat_buffers.flatten([parameter], [Slot(0, (4,), (1,), 4)], 4, torch.float32)
    assert parameter.detach().cpu().tolist() == [0, 1, 2, 3]


@on_gaudi(**LAZY)
def test_flat_buffers_work_in_lazy_mode_where_storages_can_be_resized() -> None:
    resize = torch.UntypedStorage.resize_
    accelerator = bound()
    torch.UntypedStorage.resize_ = resize  # as a newer bridge might
    parameter = nn.Parameter(torch.arange(4.0))
    accelerator.flat_buffers.flatten([parameter], [Slot(0, (4,), (1,), 4)], 4, torch.float32)
    assert parameter.detach().cpu().tolist() == [0, 1, 2, 3]
