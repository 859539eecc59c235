"""Compute: it uses the host's kernels, so it has the host's bits; and what torch looks for in a device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from accelz import Accelerator

from .on_sim import on_sim


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 24)
        self.norm = nn.LayerNorm(24)
        self.layers = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 17))

    def forward(self, tokens: Tensor) -> Tensor:
        return cross_entropy(self.layers(self.norm(self.embedding(tokens))), tokens)


def _train(device: torch.device, dtype: torch.dtype) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = _Mlp().to(dtype).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(20):
        tokens = torch.randint(0, 17, (8,), generator=torch.Generator().manual_seed(step))
        loss = model(tokens.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in model.parameters()]


@on_sim
def test_training_equals_the_host_bit_for_bit(accelerator: Accelerator) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        losses, weights = _train(accelerator.device, dtype)
        expected_losses, expected_weights = _train(torch.device("cpu"), dtype)
        assert losses == expected_losses, dtype
        assert all(map(torch.equal, weights, expected_weights)), dtype


@on_sim
def test_foreach_and_fused_optimizers_work(accelerator: Accelerator) -> None:
    for kind in ("foreach", "fused"):
        parameter = nn.Parameter(torch.ones(10, device=accelerator.device))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, foreach=kind == "foreach", fused=kind == "fused")
        parameter.square().sum().backward()
        optimizer.step()
        assert torch.allclose(parameter.cpu(), torch.full((10,), 0.899)), kind


@on_sim
def test_convolution_and_attention(accelerator: Accelerator) -> None:
    def gradients(device: torch.device) -> list[Tensor]:
        torch.manual_seed(1)
        layers = [nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Conv1d(3, 2, 2)]
        shapes = [(2, 4, 7, 7), (2, 4, 5, 5), (2, 3, 9)]
        found = []
        for layer, shape in zip(layers, shapes, strict=True):
            inputs = torch.randn(shape).to(device).requires_grad_()
            layer.to(device)(inputs).square().sum().backward()
            found += [inputs.grad, *(p.grad for p in layer.parameters())]
        query = torch.randn(2, 2, 5, 4).to(device).requires_grad_()
        scaled_dot_product_attention(query, query, query, is_causal=True).square().sum().backward()
        return [g.cpu() for g in [*found, query.grad]]

    got, expected = gradients(accelerator.device), gradients(torch.device("cpu"))
    for value, want in zip(got, expected, strict=True):
        assert torch.allclose(value, want, rtol=1e-4, atol=1e-5)


@on_sim
def test_dropout_is_drawn_again_in_a_recomputed_forward(accelerator: Accelerator) -> None:
    torch.manual_seed(2)
    values = torch.ones(64, device=accelerator.device, requires_grad=True)
    block = nn.Dropout(0.5)
    for use_reentrant in (False, True):
        out = checkpoint(lambda x: block(x) * x, values, use_reentrant=use_reentrant)
        kept = out.detach() != 0
        out.sum().backward()
        assert 8 < kept.sum().item() < 56
        assert torch.equal((values.grad != 0).cpu(), kept.cpu()), f"{use_reentrant=}"
        values.grad = None


@on_sim
def test_seeds_reach_the_device(accelerator: Accelerator) -> None:
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)  # torch's own: it seeds every device it knows
        draws.append(torch.rand(10, device=accelerator.device).cpu())
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    generator = torch.Generator(device="sim").manual_seed(3)
    assert torch.equal(torch.rand(10, generator=generator, device="sim").cpu(), draws[0])
    state = torch.default_generator.get_state()
    torch.rand(10, device=accelerator.device)
    assert torch.equal(torch.default_generator.get_state(), state), "the host's generator is another one"


@on_sim
def test_autocast(accelerator: Accelerator) -> None:
    layer = nn.Linear(4, 4).to(accelerator.device)
    with torch.autocast("sim", dtype=torch.bfloat16):
        out = layer(torch.ones(2, 4, device=accelerator.device))
        assert out.dtype == torch.bfloat16
        assert out.softmax(0).dtype == torch.float32
    out.sum().backward()
    assert layer.weight.grad.dtype == torch.float32


@on_sim
def test_views_and_copies_of_every_kind(accelerator: Accelerator) -> None:
    host = torch.arange(24.0).reshape(2, 3, 4)
    data = host.to(accelerator.device)
    for view in (
        lambda t: t.transpose(0, 2),
        lambda t: t[:, 1:, ::2],
        lambda t: t.unfold(2, 2, 1),
        lambda t: t.expand(5, 2, 3, 4),
        lambda t: t.diagonal(),
        lambda t: t.reshape(6, 4).flip(0),
        lambda t: t[torch.tensor([1, 0])],
        lambda t: t[t > 11],
        lambda t: t.nonzero(),
        lambda t: torch.stack(t.unbind(1)),
    ):
        assert torch.equal(view(data).cpu(), view(host))
    data.unfold(2, 2, 2)[0].zero_()
    assert data[0].abs().sum().item() == 0, "a view writes into its base"
    target = torch.zeros(2, 3, dtype=torch.float64, device=accelerator.device)
    target.copy_(torch.tensor([1, 2, 3]))
    assert torch.equal(target.cpu(), torch.tensor([[1.0, 2, 3]] * 2).double())
    out = torch.empty(0, device=accelerator.device)
    torch.add(data, 1, out=out)
    assert torch.equal(out.cpu(), data.cpu() + 1)


@on_sim
def test_errors_are_those_of_any_device(accelerator: Accelerator) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        torch.ones(2, 3, device="sim") @ torch.ones(2, 3, device="sim")
    with pytest.raises(RuntimeError, match="same device, but found at least two devices, sim:0 and cpu"):
        torch.ones(3, device="sim") + torch.ones(3)
    with pytest.raises(RuntimeError, match="sim:0 and sim:1"):
        torch.ones(3, device="sim") + torch.ones(3, device="sim:1")
    with pytest.raises(IndexError):
        nn.functional.embedding(torch.tensor([9], device="sim"), torch.ones(3, 2, device="sim"))
