"""torch.compile on the device: graphs of forward and backward, with and without generated code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accelz.accelerator import Accelerator
from accelz.conformance.contract import ContractBroken, expect, expect_close, stack_of
from accelz.conformance.marks import about, compile_name, proves, thorough
from accelz.conformance.operators import TOLERANCE
from accelz.roles.flat_buffer import rebind

WHERE = "Capabilities.compile"
WIDTH, ROWS = 16, 8
BOUND = TOLERANCE[torch.float32]
QUICKLY = {"compile_threads": 1, "cpp.simdlen": 1}
"""No processes for what takes seconds, and no search for the host's vector instructions by trial programs."""
DO = {
    "aot_eager": 'give torch what the error asks for, or declare compile="none"',
    "inductor": "register the device's code generator and its device interface with torch, or declare "
    'compile="aot_eager"',
}


class Layer(nn.Module):
    """Little to generate code for: a compiler of C++ takes seconds for each part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.gelu(self.linear(x))


class CompileContract:
    @pytest.mark.parametrize(
        "how",
        [
            pytest.param("aot_eager", marks=proves(compile_name("aot_eager")), id="aot_eager"),
            pytest.param("inductor", marks=[proves(compile_name("inductor")), thorough], id="inductor"),
        ],
    )
    @about(WHERE)
    def test_a_model_is_compiled(self, accelerator: Accelerator, how: str) -> None:
        """Forward and backward of a compiled model are one graph each, and right."""
        from torch._inductor import config  # here: a run of other tests does without a second of imports

        model, host = _on(accelerator.device), _on(torch.device("cpu"))
        values = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        torch.compiler.reset()
        try:
            with config.patch(QUICKLY):
                result = torch.compile(model, backend=how, fullgraph=True)(values.to(accelerator.device))
                result.square().sum().backward()
        except Exception as error:
            came = f"{type(error).__name__}: {str(error)[:2000]}\n{stack_of(error)[-2000:]}"
            raise ContractBroken(WHERE, f"{how} is declared and must compile", came, DO[how]) from error
        want = host(values)
        want.square().sum().backward()
        expected = f"what {how} has compiled must give the right result"
        expect_close(result, want, WHERE, expected, BOUND, BOUND, DO[how])
        for (name, parameter), reference in zip(model.named_parameters(), host.parameters(), strict=True):
            expected = f"what {how} has compiled must give the right gradient of {name}"
            expect(parameter.grad is not None, WHERE, expected, "None", DO[how])
            assert parameter.grad is not None
            assert reference.grad is not None
            expect_close(parameter.grad, reference.grad, WHERE, expected, BOUND, BOUND, DO[how])


class TestCompile(CompileContract):
    pass


def _on(device: torch.device) -> Layer:
    torch.manual_seed(0)
    model = Layer()
    for parameter in model.parameters():
        rebind(parameter, parameter.detach().to(device))
    return model
