"""The CUDA backend as far as it goes without a GPU: the probe's answers, and what NCCL is told."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import ErrorType
from torch.distributed import HashStore

from accelz import CollectiveError, Collectives, Group, MemoryStats, StorageSwap
from accelz.ranks.bounded_store import HostSilentError, bounded
from accelz.torch_device import ActiveMemory, TorchAccelerator
from accelz_cuda import probe
from accelz_cuda.accelerator import CudaMemory, CudaStreams, build
from accelz_cuda.collectives import NcclCollectives


class Nvml:
    """The driver's management library with `devices` GPUs, or one that answers `error`."""

    def __init__(self, devices: int = 0, error: int = 0) -> None:
        self.devices = devices
        self.error = error

    def nvmlInit_v2(self) -> int:
        return self.error

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = self.devices
        return 0

    def nvmlShutdown(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*probe.HIP_VARIABLES, "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def torch_for(monkeypatch: pytest.MonkeyPatch) -> Any:
    def build(**versions: str) -> None:
        monkeypatch.setattr(probe, "torch_build", lambda: {"__version__": "2.13.0", **versions})

    return build


def driver(monkeypatch: pytest.MonkeyPatch, library: Nvml) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)


def test_this_build_of_torch_is_read_without_importing_it() -> None:
    assert set(probe.torch_build()) >= {"__version__", "cuda", "hip"}


def test_a_torch_without_cuda_is_told(torch_for: Any) -> None:
    torch_for()
    answer = probe.probe()
    assert (answer.available, answer.reason) == (False, "torch 2.13.0 is built without CUDA and ROCm")


def test_no_driver(monkeypatch: pytest.MonkeyPatch, torch_for: Any) -> None:
    torch_for(cuda="13.0")

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert "libnvidia-ml.so.1 is not on this machine" in probe.probe().reason


@pytest.mark.parametrize(
    ("library", "available", "reason"),
    [
        (Nvml(error=9), False, "the GPU driver does not answer (NVML error 9)"),
        (Nvml(0), False, "no GPU: the driver of CUDA 13.0 sees none"),
        (Nvml(1), True, "1 GPU, CUDA 13.0"),
        (Nvml(8), True, "8 GPUs, CUDA 13.0"),
    ],
)
def test_the_drivers_answer(
    monkeypatch: pytest.MonkeyPatch, torch_for: Any, library: Nvml, available: bool, reason: str
) -> None:
    torch_for(cuda="13.0")
    driver(monkeypatch, library)
    answer = probe.probe()
    assert (answer.available, answer.reason) == (available, reason)


@pytest.mark.parametrize("hidden", ["", "-1", "-1,0", "NoDevFiles", "none", "1,1", "4,0", "GPU-8,GPU-8"])
def test_devices_that_a_variable_hides(monkeypatch: pytest.MonkeyPatch, torch_for: Any, hidden: str) -> None:
    torch_for(cuda="13.0")
    driver(monkeypatch, Nvml(4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    answer = probe.probe()
    assert not answer.available
    assert "CUDA_VISIBLE_DEVICES hides all 4 GPUs" in answer.reason


@pytest.mark.parametrize("value", ["0", "3", "2,0", "1gpu", "0,-1", "0,none", "GPU-8", "GPU-8,1", "MIG-5"])
def test_devices_that_a_variable_names(monkeypatch: pytest.MonkeyPatch, torch_for: Any, value: str) -> None:
    torch_for(cuda="13.0")
    driver(monkeypatch, Nvml(4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert torch.cuda._parse_visible_devices()
    assert probe.probe().available


@pytest.mark.parametrize("variable", probe.HIP_VARIABLES)
def test_variables_that_hide_devices_on_rocm(
    monkeypatch: pytest.MonkeyPatch, torch_for: Any, variable: str
) -> None:
    torch_for(hip="7.0")
    monkeypatch.setattr(probe, "_rocm_devices", lambda: 2)
    monkeypatch.setenv(variable, "")
    assert probe.probe().reason == f"{variable} hides all 2 GPUs; unset it to use them"


def test_rocm_counts_gpus_and_not_cpus(
    monkeypatch: pytest.MonkeyPatch, torch_for: Any, tmp_path: Path
) -> None:
    torch_for(hip="7.0")
    monkeypatch.setattr(probe, "KFD", tmp_path / "kfd")
    monkeypatch.setattr(probe, "TOPOLOGY", tmp_path / "nodes")
    assert "is not on this machine" in probe.probe().reason
    (tmp_path / "kfd").touch()
    for node, gpu in enumerate(("0", "4098", "4099")):
        folder = tmp_path / "nodes" / str(node)
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{gpu}\n")
    assert probe.probe().reason == "2 GPUs, ROCm 7.0"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the process group finds in the environment, instead of a process group."""
    environment: dict[str, str] = {"RANK": "3"}
    monkeypatch.setattr("os.environ", environment)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # whatever other tests have left
    monkeypatch.setattr(Collectives, "init", lambda *_: SimpleNamespace(environment=dict(environment)))
    return environment


def told(shared: bool, *place: int) -> dict[str, str]:
    group: Any = NcclCollectives(shared).init(10.0, *place)
    found: dict[str, str] = group.environment
    return found


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.usefixtures("environment")
def test_what_nccl_is_told(shared: bool) -> None:
    """The watchdog leaves the process alone; ranks that share a GPU meet on the loopback."""
    seen = told(shared)
    assert seen["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
    assert seen["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert seen.get("NCCL_HOSTID", "").endswith("-3") is shared
    assert (seen.get("NCCL_SOCKET_IFNAME") == seen.get("GLOO_SOCKET_IFNAME") == "lo") is shared


def test_ranks_seem_to_be_on_hosts_of_their_own_wherever_they_were_started(
    environment: dict[str, str],
) -> None:
    """A process that was a rank itself, as a test's is, starts ranks with a copy of its environment."""
    assert told(True, 0, 1)["NCCL_HOSTID"].endswith("-0")
    inherited = dict(environment)
    hosts = set()
    for rank in range(4):
        environment.clear()
        environment.update(inherited)
        hosts.add(told(True, rank, 4)["NCCL_HOSTID"])
    assert len(hosts) == 4


def test_a_rank_stays_who_it_is_when_the_job_is_asked_for_again(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL reads the host at the first collective: when an engine has asked for the job, without a rank."""
    assert told(True, 1, 2)["NCCL_HOSTID"].endswith("-1")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    for inherited in ({}, {"RANK": "0"}):
        environment.pop("RANK", None)
        environment.update(inherited)
        assert told(True)["NCCL_HOSTID"].endswith("-1")


def test_what_the_user_set_stays(environment: dict[str, str]) -> None:
    environment.update(NCCL_SOCKET_IFNAME="eth1", TORCH_NCCL_DUMP_ON_TIMEOUT="1")
    seen = told(True)
    assert (seen["NCCL_SOCKET_IFNAME"], seen["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("eth1", "1")


def test_the_accelerator_is_put_together_without_touching_a_device() -> None:
    """torch.cuda is there in every build of torch, so all of it loads where no GPU is."""
    accelerator = build()
    assert accelerator.device == torch.device("cuda", 0)
    assert accelerator.collectives.spec == "cpu:gloo,cuda:nccl"
    assert isinstance(accelerator.flat_buffers, StorageSwap)
    assert isinstance(accelerator.memory, ActiveMemory)
    assert not accelerator.capabilities.shared_device
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("name", "number", "sheet", "products"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), (989e12, 450e9), "rowwise"),
        ("NVIDIA H100 PCIe", (9, 0), (756e12, 300e9), "rowwise"),
        ("NVIDIA B200", (10, 0), (2250e12, 900e9), "rowwise"),
        ("NVIDIA L40S", (8, 9), (362e12, 32e9), "tensorwise"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), (312e12, 300e9), "none"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", (8, 0), (0.0, 0.0), "none"),
        ("NVIDIA A10", (8, 6), (0.0, 0.0), "none"),
    ],
)
def test_what_is_known_of_the_device_that_is_bound_is_declared(
    name: str,
    number: tuple[int, int],
    sheet: tuple[float, float],
    products: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TorchAccelerator, "bind", lambda self, local_rank: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: number)
    accelerator = build()
    assert (accelerator.capabilities.peak_flops, accelerator.capabilities.link_bandwidth) == (0, 0)
    accelerator.bind(0)
    assert (accelerator.capabilities.peak_flops, accelerator.capabilities.link_bandwidth) == sheet
    assert accelerator.capabilities.scaled_mm == products
    monkeypatch.setattr(torch.version, "hip", "6.4")
    accelerator.bind(0)
    assert accelerator.capabilities.scaled_mm == "none"
    assert accelerator.capabilities.compile == "inductor", "the rest stays"


def test_profiler_ranges_are_those_of_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("popped"))
    accelerator = build()
    assert accelerator.capabilities.profiler_ranges
    with pytest.raises(KeyError), accelerator.profiler_range("{0} layers.3"):
        raise KeyError
    assert seen == ["{0} layers.3", "popped"]


def test_memory_that_a_stream_still_uses_is_in_use() -> None:
    """torch counts it as active, and no longer as allocated."""
    counters = {
        "allocated_bytes": {"all": {"current": 10, "peak": 60}},
        "active_bytes": {"all": {"current": 30, "peak": 80}},
        "reserved_bytes": {"all": {"current": 100, "peak": 100}},
    }
    module = SimpleNamespace(
        __name__="torch.cuda",
        memory_stats_as_nested_dict=lambda: counters,
        mem_get_info=lambda: (500, 1000),
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
    memory = ActiveMemory(module, "cuda", pinned=False)
    assert memory.stats() == MemoryStats(allocated=30, peak=80, capacity=1000, free=570)
    counters.clear()  # nothing was ever allocated
    assert memory.stats() == MemoryStats(allocated=0, peak=0, capacity=1000, free=500)


class _Graph:
    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        self.pool = pool


def test_memory_of_captured_graphs_is_theirs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubles of torch's functions for pools: it has not run on a GPU."""
    counters = {
        "active_bytes": {"all": {"current": 30, "peak": 80}},
        "reserved_bytes": {"all": {"current": 100, "peak": 100}},
    }
    segments = {(0, 1): [{"total_size": 20, "active_size": 5}, {"total_size": 8, "active_size": 8}]}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: counters)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (500, 1000))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda pool: segments[pool])
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    streams = CudaStreams()
    memory = CudaMemory(streams)
    assert memory.stats() == MemoryStats(allocated=30, peak=80, capacity=1000, free=570)
    graph = streams._new_graph()
    streams._begin(graph)
    assert graph.pool == (0, 1)
    assert memory.stats() == MemoryStats(allocated=30, peak=80, capacity=1000, free=555)
    del graph  # torch gives its memory to whoever needs some
    assert memory.stats().free == 570


def test_ranks_may_share_a_gpu_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELZ_CUDA_SHARED_DEVICE", "1")
    assert build().capabilities.shared_device


def test_communication_buffers_are_declared_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELZ_CUDA_COMMUNICATION_BUFFERS", raising=False)
    assert not build().capabilities.communication_buffers
    monkeypatch.setenv("ACCELZ_CUDA_COMMUNICATION_BUFFERS", "1")
    assert build().capabilities.communication_buffers


@pytest.mark.parametrize("supported", [True, False])
def test_communication_buffers_are_the_librarys(supported: bool) -> None:
    """A double with the signatures of torch's own backend: it has not run on a GPU."""
    device, asked = torch.device("cpu"), []

    def allocate_tensor(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append((size, dtype, device))
        return torch.zeros(size, dtype=dtype, device=device)

    nccl = SimpleNamespace(supports_tensor_alloc=lambda device: supported, allocate_tensor=allocate_tensor)
    group: Any = SimpleNamespace(process_group=SimpleNamespace(_get_backend=lambda device: nccl))
    made = NcclCollectives(shared_device=False).empty(5, torch.bfloat16, device, group)
    assert (made.shape, made.dtype, made.device) == ((5,), torch.bfloat16, device)
    assert asked == ([(5, torch.bfloat16, device)] if supported else [])


@pytest.mark.parametrize("error", ["SUCCESS", "TIMEOUT", "COMM_ERROR", "REMOTE_ERROR"])
def test_what_the_watchdog_has_aborted_is_told(error: str) -> None:
    """`wait` only orders streams, which go on after the abort."""
    nccl = SimpleNamespace(get_error=lambda: getattr(ErrorType, error))
    process_group = SimpleNamespace(_get_backend=lambda device: nccl)
    group: Any = SimpleNamespace(process_group=process_group)
    told = nullcontext() if error == "SUCCESS" else pytest.raises(CollectiveError, match=error)
    with told:
        NcclCollectives(shared_device=False).check(group)


def test_a_store_that_says_nothing_ends_the_first_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelz_cuda.collectives.SPARE", 0.1)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    served = NcclCollectives(shared_device=False)
    monkeypatch.setattr(served, "all_reduce", lambda *_: Event().wait())
    group = Group(0, 2, 0.1, bounded(HashStore(), 1.0), None)
    with pytest.raises(HostSilentError, match="connecting ranks by NCCL has not ended"):
        served.connect(group, torch.device("cpu"))
