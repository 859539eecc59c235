"""`accelz.face`: torch.accelerator's functions, by name, arguments and results, on any backend."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from accelz import face

from . import reference_device
from .fake_distribution import good, install
from .forked import python

LATER = {"get_rng_state", "manual_seed", "set_rng_state"}
"""What torch.accelerator does not have yet, in all versions that accelz takes."""


def _functions() -> list[str]:
    own = inspect.getmembers(face, inspect.isfunction)
    return [name for name, f in own if f.__module__ == face.__name__ and not name.startswith("_")]


@pytest.mark.parametrize("name", sorted({*_functions()} - LATER))
def test_it_is_called_as_torchs(name: str) -> None:
    own, torchs = (inspect.signature(getattr(of, name)) for of in (face, torch.accelerator))
    kinds = [[(p.kind, p.default) for p in signature.parameters.values()] for signature in (own, torchs)]
    assert kinds[0] == kinds[1]


def test_on_a_host(tmp_path: Path) -> None:
    install(tmp_path, "foo", good("foo", 900))
    script = """
        import torch
        from accelz import face as accelerator
        print(accelerator.is_available(), accelerator.device_count(), accelerator.current_accelerator(True))
        accelerator.set_device_index(0)
        accelerator.set_device_index(-1)
        try:
            accelerator.set_device_index(5)
        except ValueError as error:
            print(error)
        accelerator.synchronize()
        accelerator.empty_cache()
        accelerator.manual_seed(3)
        state, first = accelerator.get_rng_state(), torch.rand(2)
        accelerator.set_rng_state(state)
        assert torch.equal(first, torch.rand(2))
        free, capacity = accelerator.get_memory_info("cpu")
        assert 0 < free <= capacity
        for other in (1, "cuda"):
            try:
                accelerator.synchronize(other)
            except ValueError as error:
                print(error)
    """
    done = python(tmp_path, script)
    assert done.stdout.splitlines() == [
        "True 1 cpu",
        "there is no device 5: this process sees 1, counted from 0",
        "device 1 is not this process's, cpu: a process uses the device that it is bound to",
        "device 'cuda' is not of the chosen type, 'cpu'",
    ], done.stderr


def test_where_no_backend_can_be_used_there_is_no_device(tmp_path: Path) -> None:
    script = """
        from accelz import face
        print(face.is_available(), face.device_count(), face.current_accelerator(check_available=True))
    """
    done = python(tmp_path, script, ACCELZ_DISABLE="cpu,cuda,hpu,xpu")
    assert done.stdout == "False 0 None\n", done.stderr


def test_on_a_device_it_says_what_torch_says(tmp_path: Path) -> None:
    reference_device.install(tmp_path)
    plugin = good("acme").replace(
        "    from accelz_cpu.accelerator import build\n", "    from plain import build\n"
    )
    install(tmp_path, "acme", plugin)
    (tmp_path / "plain.py").write_text(
        "import torch_acme\n"
        "from accelz.gloo import HostStaged\n"
        "from accelz.torch_device import TorchAccelerator, name_device\n"
        "def build():\n"
        "    name_device('acme', torch_acme)\n"
        "    return TorchAccelerator('acme', HostStaged())\n"
    )
    script = """
        import torch
        from accelz import face
        face.set_device_index("acme:1")
        kept, gone = torch.zeros(1000, device="acme"), torch.zeros(500, device="acme")
        del gone
        for name in ("current_accelerator", "current_device_index", "device_count", "memory_allocated",
                     "max_memory_allocated", "get_memory_info"):
            own, torchs = (getattr(of, name)() for of in (face, torch.accelerator))
            assert own == torchs, (name, own, torchs)
        face.reset_peak_memory_stats("acme:1")
        print(kept.device, face.max_memory_allocated(1))
    """
    done = python(tmp_path, script, ACCELZ_DEVICE="acme")
    assert done.stdout == "acme:1 4000\n", done.stderr
