"""accelz-hpu on the contract double of the vendor's bridge. No Gaudi has run any of this."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz import BackendError, BackendUnavailableError, CollectiveError, Kernels, Slot
from accelz.discovery import installed
from accelz.updates import AdamWUpdate

from .doubles.bodies import Bodies, keep_the_device
from .doubles.machine import Machine, gaudi, gaudi_environment

pytestmark = pytest.mark.slow  # starts programs

LAZY = {"PT_HPU_LAZY_MODE": "1", "DOUBLE_TORCH_FORK": "1"}
on_gaudi = Bodies()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    if not installed("sim"):
        pytest.skip("the double computes on accelz-sim, which is not installed: make sim")
    return gaudi(tmp_path_factory.mktemp("gaudi"))


@pytest.fixture(scope="module")
def outcomes(machine: Machine) -> dict[str, str]:
    return on_gaudi.run(machine, __name__, **gaudi_environment(machine))


def load() -> Any:
    import accelz

    return accelz.use("hpu")


def bound() -> Any:
    accelerator = load()
    accelerator.bind(0)
    return accelerator


def module_held() -> int | None:
    import habana_frameworks.torch.hpu as hpu  # type: ignore[import-not-found]

    held: int | None = hpu.acquired()
    return held


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


# -- AdamW -----------------------------------------------------------------------------------------

HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-3, "weight_decay": 0.1}


def state_of(accelerator: Any, numel: int = 1000, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Views into larger tensors, as an engine's shards are; gradients around the size of eps."""
    torch.manual_seed(0)
    rows = torch.randn(4, numel)
    host = {
        "master": rows[0],
        "grad": (rows[1] * 1e-3).to(dtype),
        "exp_avg": rows[2] * 1e-4,
        "exp_avg_sq": (rows[3] * 1e-4).square(),
    }
    placed = {name: torch.cat([torch.zeros(3).to(v), v]).to(accelerator.device) for name, v in host.items()}
    return {name: value[3:] for name, value in placed.items()}


def compare(accelerator: Any, calls: int, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """The kernel equals torch's reference within rounding, and went through the operator `calls` times."""
    from habana_frameworks.torch.core import operators

    hyper = HYPER | {k: v for k, v in options.items() if not isinstance(v, float) or k in HYPER}
    scalars = {k: torch.tensor(v) for k, v in options.items() if k in ("grad_scale", "skip")}
    ours = state_of(accelerator, dtype=dtype)
    reference = {name: value.cpu().clone() for name, value in ours.items()}
    weights = torch.zeros(1000, dtype=torch.bfloat16, device=accelerator.device)
    for step in (1, 2, 3):
        on_device = {k: v.to(accelerator.device) for k, v in scalars.items()}
        now = torch.tensor(float(step), device=accelerator.device)
        accelerator.kernels.step(AdamWUpdate(**ours, step=now, weights=weights, **hyper, **on_device))
        Kernels().step(AdamWUpdate(**reference, step=torch.tensor(float(step)), **hyper, **scalars))
    for name, want in reference.items():
        torch.testing.assert_close(ours[name].cpu(), want, rtol=2e-6, atol=1e-9, msg=f"{name} {options}")
    torch.testing.assert_close(weights.cpu(), ours["master"].cpu().bfloat16(), rtol=0, atol=0)
    assert operators.calls == calls, f"{operators.calls} calls {options}"
    operators.calls = 0


@on_gaudi()
def test_adamw_equals_the_reference_in_eager_mode() -> None:
    accelerator = bound()
    accelerator.kernels.chunk = 300
    compare(accelerator, calls=12)
    compare(accelerator, calls=12, dtype=torch.bfloat16, grad_scale=0.25)
    compare(accelerator, calls=12, skip=0.0)
    compare(accelerator, calls=12, weight_decay=0.0, decoupled=False)
    compare(accelerator, calls=12, beta2=0.0, beta1=0.0)


@on_gaudi(**LAZY)
def test_adamw_equals_the_reference_in_lazy_mode() -> None:
    accelerator = bound()
    compare(accelerator, calls=3)
    compare(accelerator, calls=3, grad_scale=0.25, skip=0.0)


@on_gaudi()
def test_what_the_operator_cannot_express_is_the_references() -> None:
    accelerator = bound()
    compare(accelerator, calls=0, maximize=True)
    compare(accelerator, calls=0, decoupled=False)


@on_gaudi()
def test_a_skipped_step_changes_nothing_whatever_the_gradient() -> None:
    accelerator = bound()
    state = state_of(accelerator)
    state["grad"][::2] = math.nan
    before = {name: value.cpu().clone() for name, value in state.items()}
    one = torch.tensor(1.0, device=accelerator.device)
    for step in (0.0, 1.0):  # 0: the first step of all is skipped, and was not counted
        now = torch.tensor(step, device=accelerator.device)
        accelerator.kernels.step(AdamWUpdate(**state, step=now, **HYPER, skip=one))
        for name, value in state.items():
            torch.testing.assert_close(value.cpu(), before[name], rtol=0, atol=0, equal_nan=True)


@on_gaudi()
def test_adamw_reads_nothing_back() -> None:
    """No .item() and no copy to the host: the step, the scale and the skip flag stay on the device."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            seen.add(func.name())
            to_host.update({func.name()} if isinstance(result, Tensor) and result.is_cpu else ())
            return result

    seen: set[str] = set()
    to_host: set[str] = set()
    accelerator = bound()
    state = state_of(accelerator)
    one = torch.tensor(1.0, device=accelerator.device)
    with Watch():
        accelerator.kernels.step(AdamWUpdate(**state, step=one, **HYPER, grad_scale=one, skip=one))
    assert "hpu::optimizer_adamw" in seen
    assert not to_host | (seen & {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::item"})


@on_gaudi()
def test_a_bridge_without_the_operator_is_told() -> None:
    import accelz_hpu.accelerator as ours

    ours.OPERATOR = "optimizer_of_another_name"  # type: ignore[misc, attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator = load()
    assert any("has no torch.ops.hpu" in str(w.message) for w in caught)
    assert accelerator.kernels.origin("adamw") == "torch reference"


# -- the engine ------------------------------------------------------------------------------------


def train(steps: int) -> tuple[list[float], list[float]]:
    """Losses of the engine on hpu, and of plain torch on the host, from the same start."""
    torch.manual_seed(0)
    keep_the_device()
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    model.load_state_dict(plain.state_dict())
    inputs = torch.randn(steps, 4, 8)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    engine = zero.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), zero.Config(stage=3))
    ours, want = [], []
    for batch in inputs:
        loss = plain(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        want.append(loss.item())
        loss = engine(batch.to("hpu")).square().mean()
        engine.backward(loss)
        engine.step()
        ours.append(loss)
    return [loss.item() for loss in ours], want


@on_gaudi()
def test_the_engine_trains_with_the_fused_operator() -> None:
    bound()
    ours, want = train(4)
    from habana_frameworks.torch.core import operators

    torch.testing.assert_close(torch.tensor(ours), torch.tensor(want), rtol=1e-5, atol=0)
    assert operators.calls >= 4


@on_gaudi(**LAZY)
def test_the_engine_refuses_lazy_mode_before_it_changes_anything() -> None:
    bound()
    model = nn.Linear(3, 2)
    weight, values = model.weight, model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(zero.ConfigError, match=r"does not declare storage_resize.*set PT_HPU_LAZY_MODE=0"):
        zero.initialize(model, optimizer, zero.Config(stage=3))
    assert model.weight is weight
    assert torch.equal(weight.detach(), values)
    assert optimizer.param_groups[0]["params"][0] is weight


@on_gaudi(**LAZY)
def test_the_engine_flushes_after_backward_and_after_step() -> None:
    """On a bridge whose lazy mode can resize storages; otherwise it ends at initialize, as shown above."""
    resize = torch.UntypedStorage.resize_
    bound()
    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    from habana_frameworks.torch import core

    ours, want = train(4)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(want), rtol=1e-5, atol=0)
    assert core.steps == 8


# -- the kit ---------------------------------------------------------------------------------------


def test_the_kit_runs_on_the_double(machine: Machine) -> None:
    """What needs neither collectives nor a device that is really asynchronous.

    Nor torch's checkpoint, which compares the devices of saved tensors: inside of an operator the double's
    tensors say what they really are.
    """
    what = "(FlatBuffers and not checkpoint) or (adamw and not offset) or Rng or TestMemory or Dtype"
    done = machine.run("-m", "accelz.cli", "check", "hpu", "-k", what, **gaudi_environment(machine))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("bridge", [True, False], ids=["no device", "no bridge"])
def test_accelz_check_says_why_there_is_nothing_to_check(tmp_path: Path, bridge: bool) -> None:
    machine = gaudi(tmp_path, modules=0)
    if not bridge:
        (machine.site / "habana_frameworks/torch/__init__.py").unlink()
    done = machine.run("-m", "accelz.cli", "check", "hpu")
    assert done.returncode == 2
    why = "no Gaudi: no device in /sys/class/accel" if bridge else "habana_frameworks is not installed: pip"
    assert f"'hpu' cannot be tested here: {why}" in done.stderr
