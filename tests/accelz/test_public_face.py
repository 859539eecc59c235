"""The public surface is frozen here: a change of it is a decision, not an accident."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import accelz

from .fake_distribution import python

PUBLIC = [
    "API_VERSION",
    "Accelerator",
    "AccelzError",
    "BackendDescriptor",
    "BackendError",
    "BackendNotFoundError",
    "BackendRow",
    "BackendUnavailableError",
    "Capabilities",
    "CollectiveError",
    "Collectives",
    "CopyAndKeep",
    "CopyAndShrink",
    "Event",
    "FlatBuffer",
    "FlatBufferStrategy",
    "Graph",
    "Group",
    "HOST",
    "Handle",
    "HostRng",
    "KeptBuffer",
    "Kernels",
    "Memory",
    "MemoryStats",
    "NullStreams",
    "Probe",
    "ReduceOp",
    "Rng",
    "SelectionError",
    "Slot",
    "StorageSwap",
    "Stream",
    "Streams",
    "check_blocks",
    "current",
    "dense_stride",
    "hookimpl",
    "host_collectives",
    "host_kernels",
    "list_backends",
    "rebind",
    "selected",
    "unshare",
    "use",
]

OPERATIONS = {
    "Accelerator": "bind device_count flush profiler_range",
    "Memory": "empty_host reset_peak stats trim",
    "Streams": "capture current keep_alive new synchronize use",
    "Stream": "record wait",
    "Event": "done seconds_since synchronize",
    "Graph": "replay",
    "Rng": "get_state seed set_state",
    "Collectives": (
        "all_gather all_reduce all_to_all barrier broadcast check connect destroy empty init new_group"
        " reduce_scatter"
    ),
    "Handle": "wait",
    "FlatBufferStrategy": "empty_like flatten share",
    "FlatBuffer": "bind materialize materialized release",
    "Kernels": "accumulate dequantise norm_and_nonfinite origin quantise scale_cast step",
}


def test_the_public_names() -> None:
    assert sorted(accelz.__all__) == sorted(PUBLIC)
    assert set(accelz.__all__) == set(accelz._HOME)
    assert set(PUBLIC) <= set(dir(accelz))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(accelz, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        accelz.nosuch  # noqa: B018


@pytest.mark.parametrize("role", OPERATIONS)
def test_the_operations_of_a_role(role: str) -> None:
    cls = getattr(accelz, role)
    found = [
        name
        for name, value in vars(cls).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    ]
    assert sorted(found) == OPERATIONS[role].split()


def test_the_interface_stays_small() -> None:
    assert sum(len(names.split()) for names in OPERATIONS.values()) <= 50


@pytest.mark.slow
def test_importing_and_listing_imports_no_torch_and_no_accelerator(tmp_path: Path) -> None:
    script = """
        import sys, accelz
        assert not [m for m in sys.modules if m.startswith(("torch", "accelz_", "accelz."))], "import accelz"
        accelz.list_backends()
        import accelz.cli
        heavy = [m for m in sys.modules if m == "torch" or m == "numpy" or m == "accelz_cpu.accelerator"]
        assert not heavy, heavy
        accelz.Capabilities
        assert "torch" in sys.modules
    """
    done = python(tmp_path, script)
    assert done.returncode == 0, done.stderr


def test_the_pytest_plugin_costs_nothing(tmp_path: Path) -> None:
    script = """
        import sys
        import accelz.conformance.plugin
        assert "torch" not in sys.modules and "accelz.discovery" not in sys.modules
    """
    done = python(tmp_path, script)
    assert done.returncode == 0, done.stderr
