"""Where the kernels cannot be had, the references serve, and one warning says why and what to do."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from accelz.roles.kernels import NAMES
from accelz_cuda import compiler, kernels
from accelz_cuda.compiler import CompilationError, CompilerMissingError, CubinCache
from accelz_cuda.cuda_kernels import CudaKernels
from accelz_cuda.kernels import driver
from accelz_cuda.kernels.launcher import KernelLauncher


@pytest.fixture
def launcher(tmp_path: Path) -> KernelLauncher:
    return KernelLauncher(CubinCache(tmp_path))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as torch says, there is one; the driver is still missing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(driver, "LIBRARY", "libnosuch.so.1")


@pytest.fixture
def _fresh_toolchain() -> Iterator[None]:
    compiler.toolchain.cache_clear()
    yield
    compiler.toolchain.cache_clear()


def expect_one_warning(launcher: KernelLauncher, match: str) -> None:
    served = CudaKernels(launcher)
    with pytest.warns(RuntimeWarning, match=match) as caught:
        assert {served.origin(name) for name in NAMES} == {"torch reference"}
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any(launcher.ready(entry, 1) for entry in kernels.ENTRIES)


def test_without_a_gpu(launcher: KernelLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expect_one_warning(launcher, "torch references are used .*: there is no GPU")


@pytest.mark.usefixtures("h200")
def test_on_rocm(launcher: KernelLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    expect_one_warning(launcher, r"torch is built for ROCm 7\.0")


@pytest.mark.usefixtures("h200", "_fresh_toolchain")
def test_without_the_compilers_package(launcher: KernelLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    expect_one_warning(launcher, r"compiler is missing \(.*\)\. Install .* pip install 'accelz-cuda\[cu13\]'")


@pytest.mark.usefixtures("h200", "_fresh_toolchain")
def test_without_nvrtc(launcher: KernelLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")

    def not_found() -> None:
        raise RuntimeError("libnvrtc.so.13 not found")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", not_found)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    expect_one_warning(launcher, r"libnvrtc\.so\.13 not found\)\. Install .*accelz-cuda\[cu12\]")


@pytest.mark.usefixtures("h200")
def test_without_a_driver_that_can_load_them(
    launcher: KernelLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "cubin", lambda source, arch, cache: b"")
    expect_one_warning(launcher, r"the driver cannot load them \(libnosuch\.so\.1 is missing or too old")


@pytest.mark.usefixtures("h200")
def test_a_source_that_does_not_compile_leaves_the_others_alone(
    launcher: KernelLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cubin(source: str, arch: str, cache: CubinCache) -> bytes:
        if source == "norm":
            raise CompilationError(f"{source}.cu does not compile for {arch}: line 7")
        return b"cubin"

    class AnyKernel:
        def load(self, code: bytes) -> int:
            return 1

        def kernel(self, library: int, name: str) -> int:
            return 2

    monkeypatch.setattr(compiler, "cubin", cubin)
    monkeypatch.setattr(launcher, "_open_driver", AnyKernel)
    served = CudaKernels(launcher)
    with pytest.warns(RuntimeWarning, match=r"norm\.cu does not compile for sm_90: line 7") as caught:
        origins = [(name, served.origin(name)) for name in (*NAMES, *NAMES)]
    assert len(caught) == 1
    assert {name for name, origin in origins if origin == "torch reference"} == {"norm_and_nonfinite"}


def test_tensors_of_another_device_ask_for_no_compiler(
    launcher: KernelLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise CompilerMissingError("nobody should look")

    monkeypatch.setattr(compiler, "toolchain", missing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        total = torch.ones(3)
        CudaKernels(launcher).accumulate(total, torch.ones(3))
    assert total.tolist() == [2, 2, 2]
