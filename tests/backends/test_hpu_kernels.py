"""accelz-hpu's kernels, and the engine and the kit on it, on the contract double of the vendor's bridge."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from accelz import Kernels
from accelz.discovery import installed
from accelz.updates import AdamWUpdate

from .doubles.bodies import Bodies, keep_the_device
from .doubles.bridge import LAZY, bound, load
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
