"""Every CUDA kernel compiles for the GPUs in use and stays in registers. Needs NVRTC and no GPU."""

from __future__ import annotations

import re

import pytest

from accelz_cuda import compiler, kernels

pytestmark = pytest.mark.slow  # compiles

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
INDEXED = """
extern "C" __global__ void indexed(const int* in, int* out, int n) {
  int table[64];
  for (int i = 0; i < 64; ++i) table[i] = in[i];
  for (int i = 0; i < n; ++i) table[in[i] & 63] += i;
  out[0] = table[n & 63];
}
"""
CROWDED = """
extern "C" __global__ void __launch_bounds__(1024, 2) crowded(volatile float* in, volatile float* out) {
  float values[80];
#pragma unroll
  for (int i = 0; i < 80; ++i) values[i] = in[threadIdx.x + 1024 * i];
#pragma unroll
  for (int i = 0; i < 80; ++i) out[threadIdx.x + 1024 * i] = values[i] * values[79 - i];
}
"""


def memory_use(log: str) -> dict[str, dict[str, int]]:
    """Bytes of local memory by kernel, as ptxas reports them with -v: stack frame, spill stores and loads."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        numbers = re.findall(r"(\d+) bytes (stack frame|spill stores|spill loads)", part)
        assert len(numbers) == 3, part
        found[part.split("'")[0]] = {what: int(number) for number, what in numbers}
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", kernels.SOURCES)
def test_a_source_compiles_into_registers(source: str, arch: str) -> None:
    cubin, log = compiler.toolchain().compile(source, arch, "--ptxas-options=-v")
    assert cubin[:4] == b"\x7fELF"
    assert "warning" not in log, log
    use = memory_use(log)
    assert set(use) == {entry.name for entry in kernels.ENTRIES if entry.source == source}
    assert {name: numbers for name, numbers in use.items() if any(numbers.values())} == {}


def test_every_source_is_listed() -> None:
    assert sorted(path.stem for path in kernels.FOLDER.glob("*.cu")) == sorted(kernels.SOURCES)


@pytest.mark.parametrize(("text", "what"), [(INDEXED, "stack frame"), (CROWDED, "spill stores")])
def test_the_check_sees_local_memory(text: str, what: str) -> None:
    _, log = compiler.toolchain().compile_text(text, "sm_90", "local.cu", "--ptxas-options=-v")
    (numbers,) = memory_use(log).values()
    assert numbers[what] > 0


def test_a_source_that_does_not_compile_is_an_error_with_the_log() -> None:
    with pytest.raises(compiler.CompilationError, match=r"(?s)bad\.cu does not compile for sm_90.*nosuch"):
        compiler.toolchain().compile_text("__global__ void f() { nosuch(); }", "sm_90", "bad.cu")


def test_a_gpu_that_nvrtc_does_not_know_is_an_error() -> None:
    with pytest.raises(compiler.CompilationError, match=r"norm\.cu does not compile for sm_20"):
        compiler.toolchain().compile("norm", "sm_20")
