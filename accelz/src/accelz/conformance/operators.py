"""The operators of a training step, with inputs to try each on.

A case runs forward and backward on the device and, from the same rounded inputs, on the host in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from accelz.conformance import progress
from accelz.conformance.contract import ContractBroken, expect, expect_close, missing_operator, stack_of

Tier = Literal["core", "training"]
Inputs = Callable[[torch.Generator], tuple[Tensor, ...]]

TOLERANCE = {
    torch.float64: 2.0**-30,
    torch.float32: 2.0**-13,
    torch.bfloat16: 2.0**-4,
    torch.float16: 2.0**-7,
}
"""What a result may differ by, relative to itself and to the largest element. It is wide enough for operators
that round between their parts, and far below what a wrong mask, sign or index makes."""

SHORT_PRODUCTS = 2.0**-7
"""For fp32 convolutions, whose products some devices shorten to 10 bits unless told not to."""


@dataclass(frozen=True)
class Operator:
    """A case. name: the operator, as a vendor looks it up. what: the variant. inputs: host tensors, those of
    floating point in float64. tolerance: for fp32, where it is not the usual one."""

    name: str
    what: str
    call: Callable[..., Tensor]
    inputs: Inputs
    tier: Tier = "training"
    tolerance: float = TOLERANCE[torch.float32]

    @property
    def title(self) -> str:
        """What the test is called after."""
        short = self.name.rpartition(".")[2]
        return f"{short}, {self.what}" if self.what else short

    def check(self, device: torch.device, dtype: torch.dtype, strided: bool = False) -> None:
        """Raise ContractBroken unless forward and backward on `device` in `dtype` are right.

        strided: with inputs whose elements are not next to each other.
        """
        rounded = [_rounded(x, dtype) for x in self.inputs(torch.Generator().manual_seed(0))]
        host = [_leaf(x.double() if x.is_floating_point() else x) for x in rounded]
        with operator(self.name, self._said("must run", dtype)):
            leaves = [_leaf(_strided(x.to(device)) if strided else x.to(device)) for x in rounded]
            got = self.call(*leaves)
        want = self.call(*host)
        expect(got.device == device, self.name, "must leave its result on the device", str(got.device))
        self._compare(got, want, dtype, "its result must be right")
        if want.requires_grad:
            self._check_gradients(got, want, leaves, host, dtype)

    def _check_gradients(
        self, got: Tensor, want: Tensor, leaves: list[Tensor], host: list[Tensor], dtype: torch.dtype
    ) -> None:
        weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        weights = _rounded(weights, got.dtype)
        with operator(self.name, self._said("its backward must run", dtype)):
            got.backward(weights.to(got.device))
        want.backward(weights.double())
        for index, (leaf, reference) in enumerate(zip(leaves, host, strict=True)):
            if reference.grad is None:
                continue
            what = f"the gradient of input {index}"
            expect(leaf.grad is not None, self.name, self._said(f"{what} must exist", dtype), "None")
            assert leaf.grad is not None
            self._compare(leaf.grad, reference.grad, dtype, f"{what} must be right")

    def _compare(self, got: Tensor, want: Tensor, dtype: torch.dtype, expected: str) -> None:
        bound = self.tolerance if dtype == torch.float32 else TOLERANCE[dtype]
        largest = float(want.detach().abs().max()) if want.numel() else 0.0
        with operator(self.name, self._said(expected, dtype)):
            found = got.detach().cpu()
        said = self._said(expected, dtype)
        expect_close(found, want, self.name, said, rtol=bound, atol=bound * largest)

    def _said(self, expected: str, dtype: torch.dtype) -> str:
        case = f"{self.what}, " if self.what else ""
        return f"{expected} ({case}{str(dtype).removeprefix('torch.')})"


@contextmanager
def operator(name: str, expected: str, do: str = "") -> Iterator[None]:
    """Report what an operator raises as its broken contract, and name it if it hangs or crashes in the block.
    A missing one is left to the report, which names it as torch does."""
    try:
        with progress.running(name):
            yield
    except ContractBroken:
        raise
    except Exception as error:
        if missing_operator(error):
            raise
        came = f"{type(error).__name__}: {error}\n{stack_of(error)}"
        raise ContractBroken(name, expected, came, do) from error


def floats(*shapes: tuple[int, ...]) -> Inputs:
    """Random normal numbers of these shapes."""
    return lambda generator: tuple(_normal(generator, shape) for shape in shapes)


def positive(*shapes: tuple[int, ...]) -> Inputs:
    """Random numbers between 0.5 and 1.5."""
    return lambda generator: tuple(
        0.5 + torch.rand(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )


def indexed(high: int, index: tuple[int, ...], *shapes: tuple[int, ...]) -> Inputs:
    """Random indices below `high`, some of them equal, and then floats of these shapes."""
    return lambda generator: (
        torch.randint(high, index, generator=generator),
        *(_normal(generator, shape) for shape in shapes),
    )


def _normal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype) if values.is_floating_point() else values


def _leaf(values: Tensor) -> Tensor:
    return values.detach().requires_grad_(values.is_floating_point())


def _strided(values: Tensor) -> Tensor:
    """The same values in every second place of a tensor twice as large, and in another order."""
    spread = torch.stack([values, values], -1)[..., 0]
    return spread.transpose(-1, -2).contiguous().transpose(-1, -2) if spread.dim() > 1 else spread


def _masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
    mask[:, -2:] = False
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def _scattered(index: Tensor, into: Tensor, values: Tensor) -> Tensor:
    places = torch.arange(values.shape[0], device=index.device)[:, None].expand_as(values)
    return into.scatter(0, places, values)


def _put(index: Tensor, into: Tensor, values: Tensor) -> Tensor:
    """Without accumulation each place is written once: which of several writers wins is not defined."""
    return into.index_put((torch.arange(values.shape[0], device=index.device),), values)


ATTENTION = floats((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8))
NORM = "torch.nn.functional.layer_norm"
SDPA = "torch.nn.functional.scaled_dot_product_attention"
LOSS = "torch.nn.functional.cross_entropy"
CONVOLUTION = "torch.nn.functional.conv2d"

OPERATORS = (
    # What an engine computes with: sums, scales and parts of flat buffers.
    Operator("torch.matmul", "", torch.matmul, floats((7, 5), (5, 3)), "core"),
    Operator("torch.matmul", "batched", torch.matmul, floats((2, 7, 5), (2, 5, 3)), "core"),
    Operator("torch.matmul", "transposed", lambda a, b: a.t() @ b.t(), floats((5, 7), (3, 5)), "core"),
    Operator("torch.add", "broadcast", torch.add, floats((3, 4), (4,)), "core"),
    Operator("torch.mul", "broadcast", torch.mul, floats((3, 1), (3, 4)), "core"),
    Operator("torch.div", "", torch.div, positive((3, 4), (3, 4)), "core"),
    Operator("torch.sum", "over one dimension", lambda a: a.sum(1), floats((5, 7)), "core"),
    Operator("torch.mean", "", torch.mean, floats((5, 7)), "core"),
    Operator("torch.linalg.vector_norm", "", torch.linalg.vector_norm, floats((33,)), "core"),
    Operator("torch.cat", "", lambda a, b: torch.cat([a, b, a], 1), floats((3, 2), (3, 5)), "core"),
    Operator("torch.split", "", lambda a: torch.stack(a.split(2, 1)).prod(0), floats((3, 4)), "core"),
    Operator("torch.where", "", lambda a, b: torch.where(a > 0, a, b), floats((5, 4), (5, 4)), "core"),
    # What models compute with.
    Operator("torch.nn.functional.linear", "", F.linear, floats((2, 3, 5), (4, 5), (4,))),
    Operator(
        "torch.einsum", "", lambda a, b: torch.einsum("bij,bkj->bik", a, b), floats((2, 3, 4), (2, 5, 4))
    ),
    Operator(SDPA, "", F.scaled_dot_product_attention, ATTENTION),
    Operator(
        SDPA, "causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ATTENTION
    ),
    Operator(SDPA, "masked", _masked, ATTENTION),
    Operator(
        SDPA,
        "with a bias",
        lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, attn_mask=bias),
        floats((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 6)),
    ),
    Operator(
        SDPA,
        "grouped",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        floats((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)),
    ),
    Operator(NORM, "", lambda a, w, b: F.layer_norm(a, (8,), w, b), floats((2, 3, 8), (8,), (8,))),
    Operator(NORM, "without weights", lambda a: F.layer_norm(a, (8,)), floats((2, 3, 8))),
    Operator(
        "torch.nn.functional.rms_norm", "", lambda a, w: F.rms_norm(a, (8,), w), floats((2, 3, 8), (8,))
    ),
    Operator("torch.nn.functional.group_norm", "", lambda a: F.group_norm(a, 2), floats((2, 4, 5, 3))),
    Operator("torch.nn.functional.embedding", "", F.embedding, indexed(7, (4, 5), (7, 3))),
    Operator(
        "torch.nn.functional.embedding",
        "padding",
        lambda index, weight: F.embedding(index, weight, padding_idx=int(index[0, 0])),
        indexed(7, (4, 5), (7, 3)),
    ),
    Operator(LOSS, "", lambda t, a: F.cross_entropy(a, t), indexed(5, (6,), (6, 5))),
    Operator(
        LOSS,
        "ignored targets",
        lambda t, a: F.cross_entropy(a, t, ignore_index=int(t[0])),
        indexed(5, (6,), (6, 5)),
    ),
    Operator(
        LOSS, "smoothed", lambda t, a: F.cross_entropy(a, t, label_smoothing=0.1), indexed(5, (6,), (6, 5))
    ),
    Operator("torch.nn.functional.mse_loss", "", F.mse_loss, floats((5, 4), (5, 4))),
    Operator("torch.softmax", "", lambda a: a.softmax(-1), floats((5, 7))),
    Operator("torch.log_softmax", "", lambda a: a.log_softmax(0), floats((5, 7))),
    Operator("torch.nn.functional.silu", "", F.silu, floats((5, 7))),
    Operator("torch.nn.functional.gelu", "", F.gelu, floats((5, 7))),
    Operator("torch.nn.functional.gelu", "tanh", lambda a: F.gelu(a, approximate="tanh"), floats((5, 7))),
    Operator("torch.relu", "", torch.relu, floats((5, 7))),
    Operator("torch.sigmoid", "", torch.sigmoid, floats((5, 7))),
    Operator("torch.tanh", "", torch.tanh, floats((5, 7))),
    Operator("torch.abs", "", torch.abs, floats((5, 7))),
    Operator("torch.exp", "", torch.exp, floats((5, 7))),
    Operator("torch.log", "", torch.log, positive((5, 7))),
    Operator("torch.rsqrt", "", torch.rsqrt, positive((5, 7))),
    Operator("torch.pow", "", lambda a: a.pow(3), floats((5, 7))),
    Operator("torch.cos", "", lambda a: a.cos() * a.sin(), floats((5, 7))),
    Operator("torch.clamp", "", lambda a: a.clamp(-0.5, 1.0), floats((5, 7))),
    Operator("torch.amax", "", lambda a: a.amax(1), floats((5, 7))),
    Operator("torch.cumsum", "", lambda a: a.cumsum(1), floats((5, 7))),
    Operator("torch.topk", "", lambda a: a.topk(2, -1).values, floats((5, 7))),
    Operator("torch.triu", "", lambda a: a.triu(1) + a.tril(), floats((5, 7))),
    Operator("torch.masked_fill", "", lambda a: a.masked_fill(a > 0.3, -2.0), floats((5, 7))),
    Operator(
        CONVOLUTION,
        "",
        lambda a, w, b: F.conv2d(a, w, b, padding=1),
        floats((2, 4, 6, 5), (3, 4, 3, 3), (3,)),
        tolerance=SHORT_PRODUCTS,
    ),
    Operator(
        CONVOLUTION,
        "strided, in groups",
        lambda a, w: F.conv2d(a, w, stride=2, groups=2),
        floats((2, 4, 7, 7), (6, 2, 3, 3)),
        tolerance=SHORT_PRODUCTS,
    ),
    Operator(
        "torch.nn.functional.conv1d",
        "",
        lambda a, w: F.conv1d(a, w, padding=2),
        floats((2, 3, 9), (4, 3, 3)),
        tolerance=SHORT_PRODUCTS,
    ),
    Operator("torch.gather", "", lambda i, a: a.gather(0, i), indexed(5, (4, 3), (5, 3))),
    Operator("torch.scatter", "", _scattered, indexed(5, (1,), (5, 3), (4, 3))),
    Operator(
        "torch.scatter_add",
        "",
        lambda i, into, a: into.scatter_add(0, i, a),
        indexed(5, (4, 3), (5, 3), (4, 3)),
    ),
    Operator("torch.index_select", "", lambda i, a: a.index_select(0, i), indexed(5, (8,), (5, 3))),
    Operator("torch.index_put", "", _put, indexed(5, (1,), (5, 3), (4, 3))),
    Operator(
        "torch.index_put",
        "accumulated",
        lambda i, into, a: into.index_put((i,), a, accumulate=True),
        indexed(5, (8,), (5, 3), (8, 3)),
    ),
    Operator("torch.Tensor.__getitem__", "by indices", lambda i, a: a[i, 1:], indexed(5, (4,), (5, 3))),
)
"""Names and variants are what -k takes."""
