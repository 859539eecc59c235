"""The CUDA kernels on the host: the kit's contract, and which kernel serves what.

The emulation runs the package's own sources, argument structs and launching code. What it cannot show is what
only a GPU does: the assembly of the conversions, and speed.
"""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch
from torch import Tensor

from accelz import Accelerator, Kernels
from accelz.conformance.contract import checked
from accelz.conformance.steps import StepCase
from accelz.conformance.test_graphs import MOMENTS
from accelz.conformance.test_kernels import KernelContract
from accelz.roles.kernels import LIMITS, NAMES
from accelz.updates import UPDATES, AdamWUpdate
from accelz_cpu.accelerator import build as build_cpu
from accelz_cuda import kernels
from accelz_cuda.cuda_kernels import CudaKernels
from accelz_cuda.kernels import EntryPoint
from accelz_cuda.kernels.driver import DriverError

from .cuda_operations import ADAM, OPERATIONS, operation
from .emulated_cuda import EmulatedLauncher, build

pytestmark = pytest.mark.slow  # compiles

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> EmulatedLauncher:
    return EmulatedLauncher(build(tmp_path_factory.mktemp("host_cuda")))


@pytest.fixture
def served(launcher: EmulatedLauncher) -> CudaKernels:
    launcher.launched.clear()
    return CudaKernels(launcher)


@pytest.fixture(scope="module")
def accelerator(launcher: EmulatedLauncher) -> Accelerator:
    accelerator = build_cpu()
    accelerator.kernels = CudaKernels(launcher)
    return checked(accelerator)


class TestContract(KernelContract):
    """All that the kit asks of the kernels role."""

    @pytest.mark.parametrize("name", ["scale_cast"])  # the emulation takes seconds for some others
    def test_no_element_is_too_far_away(self, accelerator: Accelerator, name: str) -> None:
        super().test_no_element_is_too_far_away(accelerator, name)


def _ones(dtype: torch.dtype, numel: int = 70) -> Tensor:
    return torch.ones(numel, dtype=dtype)


@pytest.mark.parametrize("entry", OPERATIONS, ids=lambda entry: entry.name)
def test_each_operation_has_its_kernel(
    served: CudaKernels, launcher: EmulatedLauncher, entry: EntryPoint
) -> None:
    """For each pair of dtypes, and with the reference's values."""
    written = operation(entry, torch.device("cpu"))(served)
    second = ["norm_total"] if entry is kernels.NORM_PARTIALS else []
    assert launcher.launched == [entry.name, *second]
    wanted = operation(entry, torch.device("cpu"))(Kernels())
    for mine, its in zip(written, wanted, strict=True):
        assert torch.allclose(mine.float(), its.float(), rtol=torch.finfo(BF16).eps)


@pytest.mark.parametrize("entry", kernels.ENTRIES, ids=lambda entry: entry.name)
def test_arguments_are_packed_as_the_source_declares_them(
    launcher: EmulatedLauncher, entry: EntryPoint
) -> None:
    launcher.calls.argument_size.restype = ctypes.c_ulong
    assert launcher.calls.argument_size(entry.name.encode()) == entry.arguments.size


def test_no_element_costs_a_launch(served: CudaKernels, launcher: EmulatedLauncher) -> None:
    empty = torch.empty(0)
    served.step(
        AdamWUpdate(master=empty, grad=empty, exp_avg=empty, exp_avg_sq=empty, step=torch.tensor(1.0), **ADAM)
    )
    served.accumulate(empty, empty)
    served.scale_cast(empty, empty.bfloat16())
    served.quantise(empty.to(torch.int8), empty, empty, 64)
    served.dequantise(empty, empty.to(torch.int8), empty, 64)
    assert served.norm_and_nonfinite([empty]).tolist() == [0, 0]
    assert launcher.launched == []


@pytest.mark.parametrize(
    ("total", "addend"),
    [
        pytest.param(_ones(F64), _ones(F32), id="fp64"),
        pytest.param(_ones(BF16), _ones(F16), id="two 16-bit dtypes"),
        pytest.param(_ones(F32, 140)[::2], _ones(F32), id="strided"),
        pytest.param(_ones(F32).view(7, 10), _ones(F32).view(10, 7).t(), id="transposed"),
        pytest.param(_ones(F32), _ones(F32, 1), id="broadcast"),
        pytest.param(_ones(F32).to("meta"), _ones(F32).to("meta"), id="another device"),
    ],
)
def test_what_no_kernel_is_made_for_goes_to_the_reference(
    served: CudaKernels, launcher: EmulatedLauncher, total: Tensor, addend: Tensor
) -> None:
    served.accumulate(total, addend)
    assert launcher.launched == []
    assert total.is_meta or torch.equal(total, torch.full_like(total, 2))


def test_views_of_a_parameters_shape_are_served(served: CudaKernels, launcher: EmulatedLauncher) -> None:
    total = _ones(F32).view(7, 10)
    served.accumulate(total, _ones(BF16).view(7, 10))
    assert launcher.launched == ["accumulate_f32_bf16"]
    assert torch.equal(total, torch.full((7, 10), 2.0))


def test_adamw_in_fp64_and_with_odd_scalars_goes_to_the_reference(
    served: CudaKernels, launcher: EmulatedLauncher
) -> None:
    for state, scalar in ((F64, F32), (F32, F64)):
        master, moments = _ones(state), {name: _ones(state) for name in AdamWUpdate.moment_names}
        step = torch.tensor(1.0, dtype=scalar)
        served.step(AdamWUpdate(master=master, grad=_ones(F32), **moments, step=step, **ADAM))
        assert bool((master < 1).all())
    assert launcher.launched == []


def test_copying_without_a_scale_is_left_to_torch(served: CudaKernels, launcher: EmulatedLauncher) -> None:
    output = torch.zeros(70)
    served.scale_cast(output, _ones(F32))
    assert launcher.launched == []
    assert torch.equal(output, _ones(F32))


def test_scale_cast_may_write_its_own_source(served: CudaKernels) -> None:
    for numel in (70, 9000):
        values = torch.arange(float(numel))
        served.scale_cast(values, values, torch.tensor(0.5))
        assert torch.equal(values, torch.arange(float(numel)) / 2)


def test_results_do_not_depend_on_alignment(served: CudaKernels) -> None:
    """A shard of another world size starts elsewhere, and its elements must get the same bits."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 5000, generator=generator).abs()
    results = []
    for offsets in ((0, 0), (1, 1), (1, 3)):
        master, average, square = (
            torch.cat([torch.zeros(offsets[0]), row])[offsets[0] :] for row in rows[:3]
        )
        grad = torch.cat([torch.zeros(offsets[1]), rows[3]]).bfloat16()[offsets[1] :]
        weights = torch.zeros(5000, dtype=BF16)
        state = {"master": master, "grad": grad, "exp_avg": average, "exp_avg_sq": square}
        served.step(AdamWUpdate(**state, step=torch.tensor(3.0), weights=weights, **ADAM))
        results.append((master, average, square, weights))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("kernel", UPDATES)
def test_rates_are_read_in_place_of_the_numbers(
    served: CudaKernels, launcher: EmulatedLauncher, kernel: str, moments: str
) -> None:
    """With the same bits, in the same kernel."""
    if moments != "fp32" and not UPDATES[kernel].moment_names:
        pytest.skip("it has no moments")
    case = dataclasses.replace(StepCase(kernel, 1500, 1, F32, {}, 3, 0.5, 0.0), **MOMENTS[moments])
    results = []
    for with_rates in (False, True):
        values = list(case.inputs().values())
        update = case.update(*values, weights=values[0].bfloat16())
        rates = torch.tensor([update.lr, update.decay])
        served.step(dataclasses.replace(update, lr=7.0, rates=rates) if with_rates else update)
        results.append([*values, update.weights])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(launcher.launched) == 2
    assert len(set(launcher.launched)) == 1


def test_norm_of_more_tensors_than_a_launch_takes(served: CudaKernels, launcher: EmulatedLauncher) -> None:
    dtypes = (F32, BF16, F16)
    tensors = [torch.full((i % 5 * 10,), 2.0, dtype=dtypes[i % 3]) for i in range(300)]
    total, nonfinite = served.norm_and_nonfinite(tensors).tolist()
    assert (total, nonfinite) == (sum(4 * t.numel() for t in tensors), 0)
    assert launcher.launched == ["norm_partials"] * 2 + ["norm_total"]


def test_norm_is_the_same_bits_every_time(served: CudaKernels) -> None:
    tensors = [torch.randn(70_001), torch.randn(100_003).bfloat16(), torch.randn(5)]
    first = served.norm_and_nonfinite(tensors)
    assert torch.equal(first, served.norm_and_nonfinite(tensors))
    want = sum(t.double().square().sum() for t in tensors)
    assert torch.allclose(first[0].double(), want, rtol=1e-6)


def test_norm_that_overflows_is_not_finite(served: CudaKernels) -> None:
    assert served.norm_and_nonfinite([torch.full((10_000,), 1e18)])[1] == 1
    assert served.norm_and_nonfinite([torch.full((10_000,), 1e30)])[1] == 1


@pytest.mark.parametrize("codes_dtype", LIMITS, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_quantising_agrees_with_the_reference(
    served: CudaKernels, codes_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    source = torch.randn(10_001, generator=torch.Generator().manual_seed(1)).to(dtype)
    source[5000] = torch.inf
    source[1300], source[1301] = torch.nan, -torch.inf
    source[3000:3700] = -1e-39
    for block in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        found = []
        for implementation in (served, Kernels()):
            codes, scales = torch.zeros(10_001, dtype=codes_dtype), torch.zeros(-(-10_001 // block))
            implementation.quantise(codes, scales, source, block)
            found.append((codes.float(), scales))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1].nan_to_num(-1), found[1][1].nan_to_num(-1))


def test_a_thread_without_a_context_enters_it(served: CudaKernels, launcher: EmulatedLauncher) -> None:
    total = _ones(F32)
    served.accumulate(total, _ones(F32))
    launcher.calls.leave_context(1)
    served.accumulate(total, _ones(F32))
    assert launcher.calls.entered() == 1
    assert torch.equal(total, torch.full((70,), 3.0))


def test_a_refused_launch_names_the_kernel(served: CudaKernels, launcher: EmulatedLauncher) -> None:
    launcher.calls.leave_context(2)
    with pytest.raises(
        RuntimeError, match=r"launching kernel accumulate_f32_f32 failed: unknown error \(201\)"
    ):
        served.accumulate(_ones(F32), _ones(F32))


def test_a_kernel_that_is_not_in_the_library_is_named(launcher: EmulatedLauncher) -> None:
    driver = launcher._open_driver()
    missing = dataclasses.replace(kernels.NORM_TOTAL, name="nosuch")
    with pytest.raises(DriverError, match=r"loading kernel nosuch failed: CUDA_ERROR_NOT_FOUND \(500\)"):
        driver.kernel(driver.load(b"norm"), missing.name)


def test_every_operation_says_that_the_kernels_serve(served: CudaKernels) -> None:
    assert {served.origin(name) for name in NAMES} == {"accelz_cuda.cuda_kernels.CudaKernels"}
    with pytest.raises(AttributeError, match="no kernel called 'nosuch'"):
        served.origin("nosuch")
