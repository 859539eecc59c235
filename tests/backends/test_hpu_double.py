"""The double of the vendor's bridge refuses what the bridge refuses; else tests on it would prove nothing."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accelz.discovery import installed

from .doubles.bodies import Bodies
from .doubles.machine import Machine, gaudi, gaudi_environment

pytestmark = pytest.mark.slow  # starts programs

LAZY = {"PT_HPU_LAZY_MODE": "1", "DOUBLE_TORCH_FORK": "1", "PT_HPU_WEIGHT_SHARING": "0"}
EAGER = {"PT_HPU_LAZY_MODE": "0"}
on_gaudi = Bodies()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if not installed("sim"):
        pytest.skip("the double computes on accelz-sim, which is not installed: make sim")
    machine: Machine = gaudi(tmp_path_factory.mktemp("gaudi"))
    return on_gaudi.run(machine, __name__, **gaudi_environment(machine))


@on_gaudi(**EAGER)
def test_torch_hpu_lacks_what_others_have() -> None:
    import habana_frameworks.torch  # type: ignore[import-not-found]  # noqa: F401

    hpu = torch.get_device_module("hpu")
    assert not hasattr(hpu, "empty_cache")
    with pytest.raises(TypeError):
        hpu.synchronize(0)
    assert set(hpu.memory_stats()) >= {"Limit", "InUse", "MaxInUse"}
    with pytest.raises(AssertionError, match="Invalid device id"):
        hpu.memory_stats(8)
    with pytest.raises(RuntimeError, match="only device 0"):
        hpu.get_rng_state(torch.device("hpu", 1))


@on_gaudi(**EAGER)
def test_process_groups_take_fewer_arguments() -> None:
    import habana_frameworks.torch  # noqa: F401

    store = dist.HashStore()  # type: ignore[attr-defined]
    place = {"rank": 0, "world_size": 1, "store": store, "timeout": timedelta(seconds=5)}
    with pytest.raises(TypeError, match="device_id"):
        dist.init_process_group("cpu:gloo,hpu:hccl", device_id=torch.device("hpu", 0), **place)  # type: ignore[arg-type]
    dist.init_process_group("cpu:gloo,hpu:hccl", **place)  # type: ignore[arg-type]
    for name in ("device_id", "group_desc", "use_local_synchronization"):
        with pytest.raises(TypeError, match=name):
            dist.new_group([0], **{name: None})  # type: ignore[arg-type]


@on_gaudi(**EAGER)
def test_registering_with_a_string_registers_its_letters() -> None:
    """A trap of torch up to 2.13, and why the spec names the backend of each device type."""
    import habana_frameworks.torch  # noqa: F401

    assert dist.Backend.default_device_backend_map["hpu"] == "hccl"
    dist.Backend.register_backend("other", lambda *a: None, devices="hpu")  # type: ignore[arg-type, return-value]
    trapped = torch.__version__ < (2, 14)  # a TorchVersion, which compares as versions do
    assert ("u" in dist.Backend.default_device_backend_map) == trapped


@on_gaudi(**EAGER)
def test_a_process_has_one_device() -> None:
    from habana_frameworks.torch import hpu

    hpu.set_device(2)
    torch.ones(1, device="hpu")
    assert hpu.acquired() == 2
    hpu.set_device(3)  # silently the old one: the identifier in the environment wins
    torch.ones(1, device="hpu")
    assert (hpu.acquired(), hpu.current_device(), os.environ["HLS_MODULE_ID"]) == (2, 0, "2")


@on_gaudi(**EAGER)
def test_a_device_parameter_takes_no_host_data() -> None:
    import habana_frameworks.torch  # noqa: F401

    parameter = torch.nn.Parameter(torch.ones(3, device="hpu"))
    with pytest.raises(RuntimeError):
        parameter.data = torch.ones(3)


@on_gaudi(**LAZY)
def test_recorded_work_waits_and_has_no_storage() -> None:
    from habana_frameworks.torch import core, hpu

    values = torch.ones(3, device="hpu") + 1
    event = hpu.Event()
    event.record()
    assert not event.query()
    with pytest.raises(RuntimeError, match="should not be called in lazy flow"):
        values.untyped_storage().resize_(0)
    core.mark_step()
    assert event.query()


@on_gaudi(**LAZY)
def test_the_lazy_operator_does_not_write_views_of_moments() -> None:
    import habana_frameworks.torch  # noqa: F401

    row = torch.zeros(4, device="hpu")
    g, w, m, v = (torch.ones(4, device="hpu") for _ in range(4))
    step = torch.full((1,), -0.1, device="hpu")
    torch.ops.hpu.optimizer_adamw([g], [w], [row[:]], [v], step, 0.5, 0.5, 1e-8, 1.0)
    assert row.cpu().tolist() == [0, 0, 0, 0]
    torch.ops.hpu.optimizer_adamw([g], [w], [m], [v], step, 0.5, 0.5, 1e-8, 1.0)
    assert m.cpu().tolist() == [1, 1, 1, 1]
    with pytest.raises(RuntimeError):  # the eager signature
        torch.ops.hpu.optimizer_adamw([g], [w], [m], [v], step, 0.5, 0.5, 1e-8, step, True)


@on_gaudi(**EAGER)
def test_the_eager_operator_wants_decay_on_the_device() -> None:
    import habana_frameworks.torch  # noqa: F401

    g, w, m, v = (torch.ones(4, device="hpu") for _ in range(4))
    step = torch.full((1,), -0.1, device="hpu")
    with pytest.raises(RuntimeError):  # the lazy signature
        torch.ops.hpu.optimizer_adamw([g], [w], [m], [v], step, 0.5, 0.5, 1e-8, 1.0)
    with pytest.raises(RuntimeError, match="empty weight vector"):
        torch.ops.hpu.optimizer_adamw([], [], [], [], step, 0.5, 0.5, 1e-8, step, True)
