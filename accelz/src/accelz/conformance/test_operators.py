"""What a training step asks of torch on the device: operators and their gradients, compared with the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from accelz.accelerator import Accelerator
from accelz.conformance.contract import expect, expect_close
from accelz.conformance.marks import about, needs, over_dtypes, thorough, tier
from accelz.conformance.operators import OPERATORS, TOLERANCE, Operator, Tier, operator
from accelz.roles.host import HOST

WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DROPOUT = "torch.nn.functional.dropout"
AUTOCAST = "torch.autocast"
CHECKPOINT = "torch.utils.checkpoint"
PRODUCTS: tuple[tuple[Any, ...], ...] = (
    (torch.matmul, (3, 4), (4, 5)),
    (torch.bmm, (2, 3, 4), (2, 4, 5)),
    (F.conv1d, (2, 3, 9), (4, 3, 3)),
    (F.conv2d, (2, 3, 6, 5), (4, 3, 3, 3)),
)
"""What autocast casts for on torch's own devices, with shapes of inputs."""
NORMS: tuple[tuple[Any, ...], ...] = ((F.layer_norm, (6,), 6, (0, 1)), (F.group_norm, 2, 4, (0, 2)))
"""With the shape or number of groups, the size of their weights, and the other dimensions."""
BF16 = needs("dtype bfloat16")
ROUND = TOLERANCE[torch.float32]


def over_operators(of: Tier) -> pytest.MarkDecorator:
    """Parametrise a test over the operators of a tier."""
    chosen = [o for o in OPERATORS if o.tier == of]
    return pytest.mark.parametrize("case", [pytest.param(o, id=o.title) for o in chosen])


@tier("core")
class CoreOperatorsContract:
    """What an engine itself computes with."""

    @about("torch")
    @over_operators("core")
    @over_dtypes(torch.float32, torch.bfloat16)
    def test_operator(self, accelerator: Accelerator, case: Operator, dtype: torch.dtype) -> None:
        """Forward and backward are those of the host."""
        case.check(accelerator.device, dtype)

    @about("torch")
    @over_operators("core")
    @thorough
    def test_operator_on_strided_inputs(self, accelerator: Accelerator, case: Operator) -> None:
        """Inputs need not be contiguous."""
        case.check(accelerator.device, torch.float32, strided=True)

    @about("torch.Tensor.copy_")
    @over_dtypes(*WHOLE, torch.float64, torch.float32, torch.bfloat16, torch.float16)
    def test_copies(self, accelerator: Accelerator, dtype: torch.dtype) -> None:
        """Values of every dtype reach the device, another place there, and the host again, in any layout."""
        values = torch.randint(0, 2 if dtype == torch.bool else 100, (6, 4)).to(dtype)
        with operator("torch.Tensor.copy_", f"must copy {dtype}"):
            there = torch.empty_like(values, device=accelerator.device).copy_(values)
            target = torch.empty(4, 6, dtype=dtype, device=accelerator.device)
            target.copy_(there.t())
            part = target[1:3, ::2].cpu()
            there[::2].copy_(values[1::2])
        expect_close(target, values.t(), "torch.Tensor.copy_", f"must transpose {dtype}")
        expect_close(part, values.t()[1:3, ::2], "torch.Tensor.copy_", "must read every second element")
        expect_close(there[::2], values[1::2], "torch.Tensor.copy_", "must write every second row")

    @about("torch.Tensor.to")
    @over_dtypes(torch.float64, torch.bfloat16, torch.float16)
    def test_conversions(self, accelerator: Accelerator, dtype: torch.dtype) -> None:
        """A cast on the device rounds as the host does, from and to fp32 and whole numbers."""
        values = torch.randn(1001, generator=torch.Generator().manual_seed(0)) * 10
        there = values.to(accelerator.device)
        for source, goal in ((torch.float32, dtype), (dtype, torch.float32), (dtype, torch.int32)):
            with operator("torch.Tensor.to", f"must cast {source} to {goal}"):
                got = there.to(source).to(goal).cpu()
            want, said = (
                values.to(source).double().to(goal),
                f"must round {source} to {goal} as the host does",
            )
            expect_close(got, want, "torch.Tensor.to", said)

    @about("torch.Tensor.view")
    def test_views_share_their_memory(self, accelerator: Accelerator) -> None:
        """What is written through a view shows in its base, and the other way round."""
        base = torch.zeros(4, 6, device=accelerator.device)
        host = torch.zeros(4, 6, dtype=torch.float64)
        with operator("torch.Tensor.view", "views must be writable"):
            for values in (base, host):
                values.view(-1)[3:5] = 1.0
                values.t()[2].add_(2.0)
                values.view(2, 2, 6)[1, 0, ::2].mul_(3.0).sub_(1.0)
                values.as_strided((2, 2), (1, 6), 8).fill_(5.0)
                values.narrow(1, 4, 2).copy_(torch.ones(2, device=values.device).expand(4, 2))
                values.diagonal().zero_()
        expect_close(base, host, "torch.Tensor.view", "writes through views must reach their base")

    @about("torch.autograd")
    def test_writes_to_views_are_differentiated(self, accelerator: Accelerator) -> None:
        """A gradient passes through a part that was written in place."""

        def gradient(device: torch.device, dtype: torch.dtype) -> Tensor:
            values = torch.linspace(-1, 1, 12, device=device, dtype=dtype).requires_grad_()
            work = values * 2
            work.view(3, 4)[1].mul_(values[:4])
            work.sum().backward()
            assert values.grad is not None
            return values.grad.cpu()

        with operator("torch.autograd", "writes to views must be differentiated"):
            got = gradient(accelerator.device, torch.float32)
        want = gradient(HOST, torch.float64)
        expect_close(got, want, "torch.autograd", "gradients must pass through views", rtol=ROUND)

    @about("torch.autograd")
    def test_gradients_add_up(self, accelerator: Accelerator) -> None:
        """A tensor used twice gets the sum of its gradients, also over two backwards, and hooks see it."""
        weight = torch.ones(3, 3, device=accelerator.device, requires_grad=True)
        seen: list[float] = []
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))
        with operator("torch.autograd", "gradients must be accumulated"):
            for _ in range(2):
                (weight @ (weight @ torch.ones(3, device=accelerator.device))).sum().backward()
        expect(seen == [54.0, 108.0], "torch.autograd", "hooks must see sums of 54 and 108", str(seen))


@tier("training")
class TrainingOperatorsContract:
    """What models and their training loops compute with."""

    @about("torch")
    @over_operators("training")
    @over_dtypes(torch.float32, torch.bfloat16)
    def test_operator(self, accelerator: Accelerator, case: Operator, dtype: torch.dtype) -> None:
        """Forward and backward are those of the host."""
        case.check(accelerator.device, dtype)

    @about("torch")
    @over_operators("training")
    @thorough
    def test_operator_on_strided_inputs(self, accelerator: Accelerator, case: Operator) -> None:
        """Inputs need not be contiguous."""
        case.check(accelerator.device, torch.float32, strided=True)

    @about(DROPOUT)
    @over_dtypes(torch.float32, torch.bfloat16)
    def test_dropout(self, accelerator: Accelerator, dtype: torch.dtype) -> None:
        """Dropout drops its share, scales the rest, and lets the gradient through where it let values."""
        values = torch.ones(64, 65, device=accelerator.device, dtype=dtype, requires_grad=True)
        accelerator.rng.seed(5)
        with operator(DROPOUT, "must run, forward and backward"):
            kept = F.dropout(values, 0.25)
            kept.sum().backward()
        assert values.grad is not None
        share = float((kept != 0).float().mean())
        expect(0.7 < share < 0.8, DROPOUT, "must keep 3 of 4 elements at p=0.25", f"{share:.3f} of them")
        want = torch.where(kept.cpu() != 0, 1 / 0.75, 0.0)
        bound = TOLERANCE[dtype]
        expect_close(kept, want, DROPOUT, "what is kept must be scaled by 1 / (1 - p)", rtol=bound)
        expected = "its gradient must have the forward's mask and scale"
        expect_close(values.grad, want, DROPOUT, expected, rtol=bound)
        evaluated = F.dropout(values, 0.25, training=False)
        expect_close(evaluated, values, DROPOUT, "must change nothing in evaluation")

    @about(DROPOUT)
    def test_dropout_draws_from_the_generator(self, accelerator: Accelerator) -> None:
        """Dropout repeats with the seed, moves on with each call, and follows a restored state."""
        values = torch.ones(1001, device=accelerator.device)
        accelerator.rng.seed(5)
        state = accelerator.rng.get_state()
        with operator(DROPOUT, "must run"):
            first, second = (F.dropout(values, 0.5).cpu() for _ in range(2))
            accelerator.rng.seed(5)
            seeded = F.dropout(values, 0.5).cpu()
            accelerator.rng.set_state(state)
            restored = F.dropout(values, 0.5).cpu()
        do = "draw the mask from the device's default generator, and advance it"
        expect(not torch.equal(first, second), DROPOUT, "must draw anew in every call", "the same mask", do)
        expect_close(seeded, first, DROPOUT, "must repeat with the seed", do=do)
        expect_close(restored, first, DROPOUT, "must repeat with a restored state", do=do)

    @about(CHECKPOINT)
    @pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
    def test_checkpoint_recomputes_with_the_same_numbers(
        self, accelerator: Accelerator, reentrant: bool
    ) -> None:
        """A recomputed forward drops what the first one dropped, and leaves the generator as it was."""

        def run(recompute: bool) -> tuple[Tensor, Tensor]:
            accelerator.rng.seed(11)
            values = torch.ones(257, device=accelerator.device, requires_grad=True)
            part = lambda x: F.dropout(x * x, 0.5)  # noqa: E731
            result = checkpoint(part, values, use_reentrant=reentrant) if recompute else part(values)
            noise = torch.rand(9, device=accelerator.device)
            assert isinstance(result, Tensor)
            result.sum().backward()
            assert values.grad is not None
            return values.grad.cpu(), (noise + torch.rand(9, device=accelerator.device)).cpu()

        with operator(CHECKPOINT, "must run"):
            (plain, numbers), (gradient, after) = run(False), run(True)
        do = (
            "give the device module _initialized, _is_in_bad_fork, get_rng_state and set_rng_state: torch "
            "looks them up by name"
        )
        expect_close(gradient, plain, CHECKPOINT, "recomputed dropout must be the same", rtol=ROUND, do=do)
        expect_close(after, numbers, CHECKPOINT, "later random numbers must be the same", do=do)

    @about(AUTOCAST)
    @BF16
    def test_autocast(self, accelerator: Accelerator) -> None:
        """Products are computed in bf16, losses in fp32, and fp32 weights get fp32 gradients."""
        layer, values, host = _layer(accelerator)
        with operator(AUTOCAST, "must run, forward and backward"), _autocast(accelerator):
            product = layer(values)
            loss = F.cross_entropy(product, torch.arange(5, device=accelerator.device))
        loss.backward()
        do = "register the device's autocast lists, and get_amp_supported_dtype in its module"
        came = str(product.dtype)
        expect(product.dtype == torch.bfloat16, AUTOCAST, "a linear layer must give bfloat16", came, do)
        expect(loss.dtype == torch.float32, AUTOCAST, "a loss must stay float32", str(loss.dtype), do)
        F.cross_entropy(host(values.cpu()), torch.arange(5)).backward()
        assert layer.weight.grad is not None
        assert host.weight.grad is not None
        same = layer.weight.grad.dtype == torch.float32
        expect(same, AUTOCAST, "gradients of weights must be float32", str(layer.weight.grad.dtype), do)
        bound = TOLERANCE[torch.bfloat16]
        expected = "gradients must be those of the host"
        expect_close(layer.weight.grad, host.weight.grad, AUTOCAST, expected, bound, bound, do)

    @about(AUTOCAST)
    @BF16
    def test_autocast_casts_for_every_product(self, accelerator: Accelerator) -> None:
        """Engines send weights of such layers already cast."""
        for product, *shapes in PRODUCTS:
            inputs = [torch.ones(shape, device=accelerator.device) for shape in shapes]
            with operator(AUTOCAST, f"{product.__name__} must run"), _autocast(accelerator):
                came = product(*inputs).dtype
            do = f"add {product.__name__} to the device's autocast lists"
            expected = f"{product.__name__} must give bfloat16"
            expect(came == torch.bfloat16, AUTOCAST, expected, str(came), do)

    @about(AUTOCAST)
    @BF16
    def test_autocast_norms_take_what_products_give(self, accelerator: Accelerator) -> None:
        """Weights of norms stay float32, and get gradients."""
        host = torch.randn(2, 4, 6).bfloat16()
        for norm, groups, size, others in NORMS:
            values = host.to(accelerator.device).requires_grad_()
            weight = torch.ones(size, device=accelerator.device, requires_grad=True)
            do = f"let autocast have {norm.__name__} in float32, or its kernel take both dtypes"
            with operator(AUTOCAST, f"{norm.__name__} must run, forward and backward", do):
                with _autocast(accelerator):
                    loss = norm(values, groups, weight, torch.zeros_like(weight)).float().square().sum()
                loss.backward()
            assert weight.grad is not None
            want = 2 * norm(host.float(), groups).square().sum(others)
            bound = TOLERANCE[torch.bfloat16]
            expected = f"the weights of {norm.__name__} must get their gradients"
            expect_close(weight.grad, want, AUTOCAST, expected, bound, bound, do)

    @about(AUTOCAST)
    @BF16
    def test_autocast_sees_new_weights(self, accelerator: Accelerator) -> None:
        """Copies of weights that autocast has made are gone with its region: a step changes the weights."""
        layer, values, _ = _layer(accelerator)
        results = []
        for factor in (1.0, 2.0):
            with torch.no_grad():
                layer.weight.fill_(factor)
            with operator(AUTOCAST, "must run"), _autocast(accelerator):
                results.append((layer(values) - layer.bias + layer(values) - layer.bias).float().cpu())
        bound = TOLERANCE[torch.bfloat16]
        expected = "weights that were written after a region must count in the next one"
        do = "cached copies must not outlive the outermost autocast region"
        expect_close(results[1], 2 * results[0], AUTOCAST, expected, bound, bound, do)

    @about("torch.optim")
    @pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
    @pytest.mark.parametrize("way", ["one by one", "foreach", "fused"])
    def test_optimizers(self, accelerator: Accelerator, kind: str, way: str) -> None:
        """torch's optimizers step as on the host, parameter by parameter, foreach and fused."""
        where = f"torch.optim.{kind}"
        settings: dict[str, object] = {"lr": 0.1, **({"momentum": 0.9} if kind == "SGD" else {})}
        flags: dict[str, object] = {"foreach": False} if way == "one by one" else {way: True}
        host = _stepped(_parameters(HOST, torch.float64), where, {**settings, "foreach": False}, "one by one")
        got = _stepped(_parameters(accelerator.device, torch.float32), where, settings | flags, way)
        for index, (value, want) in enumerate(zip(got, host, strict=True)):
            expected = f"parameter {index} must be that of the host ({way})"
            expect_close(value, want, where, expected, rtol=ROUND, atol=ROUND)

    @about("torch.nn.utils.clip_grad_norm_")
    def test_clipping(self, accelerator: Accelerator) -> None:
        """Gradients are clipped by their common norm."""
        where, norms = "torch.nn.utils.clip_grad_norm_", []
        for device, dtype in ((accelerator.device, torch.float32), (HOST, torch.float64)):
            parameters = _parameters(device, dtype)
            with operator(where, "must run"):
                norms.append(nn.utils.clip_grad_norm_(parameters, 1.0).cpu())
                norms.append(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).cpu())
        for got, want in zip(norms[:2], norms[2:], strict=True):
            expect_close(got, want, where, "norms must be those of the host", rtol=ROUND)


class TestCoreOperators(CoreOperatorsContract):
    pass


class TestTrainingOperators(TrainingOperatorsContract):
    pass


def _autocast(accelerator: Accelerator) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(accelerator.device.type, torch.bfloat16)


def _layer(accelerator: Accelerator) -> tuple[nn.Linear, Tensor, nn.Linear]:
    """A layer on the device, an input for it, and the same layer on the host."""
    torch.manual_seed(0)
    host, values = nn.Linear(7, 6), torch.randn(5, 7)
    layer = nn.Linear(7, 6, device=accelerator.device)
    layer.load_state_dict(host.state_dict())
    return layer, values.to(accelerator.device), host


def _parameters(device: torch.device, dtype: torch.dtype) -> list[nn.Parameter]:
    """Parameters of several shapes with gradients, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in ((3, 5), (7,), (2, 2, 3), ()):
        values, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
        made.append(nn.Parameter(values.to(device, dtype)))
        made[-1].grad = gradient.to(device, dtype)
    return made


def _stepped(
    parameters: Sequence[nn.Parameter], where: str, settings: dict[str, object], way: str
) -> Sequence[Tensor]:
    """The values after three steps. Skips where torch has no such optimizer for the device."""
    kind: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, where.rpartition(".")[2])
    try:
        optimizer = kind(parameters, **settings)
    except RuntimeError as error:
        if way == "fused":
            pytest.skip(f"torch fuses it for other devices only: {error}")
        raise
    for _ in range(3):
        with operator(where, f"must step ({way})"):
            optimizer.step()
    return [p.detach().cpu() for p in parameters]
