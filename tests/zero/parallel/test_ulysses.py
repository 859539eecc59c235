"""Sequences divided over ranks, with attention by Ulysses, beside one process with whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import checkpoint

import accelz
import zero
from accelz.conformance.cluster import Clusters, Context
from tests.zero.helpers.decoder import LENGTH, ROWS, WORDS, Decoder
from tests.zero.helpers.loops import train_on
from tests.zero.helpers.meshes import mesh_of
from tests.zero.helpers.optimizers import sgd
from tests.zero.helpers.training import relative_error, state_error
from zero.parallel import tokens, ulysses

RANKS, STEPS, CLIP = 4, 3, 0.05


def batch_of(step: int, row: int) -> dict[str, Tensor]:
    """Some have no labels at the beginning, so that ranks have different numbers of them."""
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(10 * step + row))
    labels = ids.clone()
    labels[:, : 1 + row + step] = tokens.IGNORED
    return {"input_ids": ids, "labels": labels}


def unsharded(
    keys: tuple[int, ...], data: int, over_rows: bool
) -> tuple[list[list[float]], list[float], dict[str, Tensor]]:
    """Losses by step and row, norms and final weights. over_rows: rows count alike, otherwise labels do."""
    model, losses, norms = Decoder(keys), [], []
    optimizer = sgd(model)
    for step in range(STEPS):
        sums, counts = [], []
        for row in range(data):
            batch = batch_of(step, row)
            logits = model(batch["input_ids"], torch.arange(LENGTH).expand(ROWS, -1))[:, :-1]
            labels = batch["labels"][:, 1:]
            sums.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
            counts.append(int((labels != tokens.IGNORED).sum()))
        means = [s / n for s, n in zip(sums, counts, strict=True)]
        loss = sum(means) / data if over_rows else sum(sums) / sum(counts)
        loss.backward()
        losses.append([(each if over_rows else loss).item() for each in means])
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: value.detach() for name, value in model.state_dict().items()}


WAYS: dict[str, tuple[int, tuple[int, ...], dict[str, Any], bool, bool]] = {
    # ranks of a sequence; heads of keys; settings; whether rows count alike; whether layers are recomputed
    "stage 1": (2, (4, 2), {"stage": 1}, True, False),
    "stage 2": (2, (1, 2), {"stage": 2}, False, False),
    "stage 3": (2, (1, 4), {"stage": 3}, True, True),
    "four ranks": (4, (1, 2), {"stage": 3}, True, False),
}


def training_body(context: Context) -> dict[str, float]:
    found = {}
    for name, (size, keys, settings, over_rows, recomputed) in WAYS.items():
        data = RANKS // size
        losses, norms, weights = unsharded(keys, data, over_rows)
        mesh = mesh_of(("dp", data), ("cp", size))
        group, row = mesh.get_group("cp"), mesh.get_local_rank("dp")
        counted = group if over_rows else mesh._flatten().get_group()
        model = Decoder(keys, recomputed)
        config = zero.Config(timeout=20, clip_norm=CLIP, **settings)
        engine = zero.initialize(model, sgd(model), config, mesh=mesh, data_dims=("dp", "cp"))
        told, seen = [], []
        for step in range(STEPS):
            batch = {key: value.to(engine.device) for key, value in batch_of(step, row).items()}
            inputs, labels = tokens.split_batch(batch, group)
            with ulysses.Attention(group):
                loss = tokens.cross_entropy(model(**inputs), labels, counted)
                train_on(engine, loss)
            told.append(loss.item())
            seen.append(float(engine.grad_norm or 0))
        found[f"{name}: losses"] = relative_error(told, [each[row] for each in losses])
        found[f"{name}: norms"] = relative_error(seen, norms)
        state = engine.state_dict()
        found[f"{name}: weights"] = state_error(state, weights) if state else 0.0
    return found


def test_divided_sequences_train_as_whole_ones(cluster: Clusters) -> None:
    for found in cluster(RANKS).run(training_body, limit=60):
        assert max(found.values()) < 1e-6, found


def compiled_body(context: Context) -> float:
    losses, _, _ = unsharded((1,), 1, True)
    mesh = mesh_of(("dp", 1), ("cp", 2))
    group, model, told = mesh.get_group("cp"), Decoder((1,)), []
    config = zero.Config(timeout=60, clip_norm=CLIP, compile=zero.Compile(inner="aot_eager"))
    engine = zero.initialize(model, sgd(model), config, mesh=mesh, data_dims=("dp", "cp"))
    for step in range(STEPS):
        batch = {key: value.to(engine.device) for key, value in batch_of(step, 0).items()}
        inputs, labels = tokens.split_batch(batch, group)
        with ulysses.Attention(group):
            loss = tokens.cross_entropy(model(**inputs), labels, group)
            train_on(engine, loss)
        told.append(loss.item())
    return relative_error(told, [loss for (loss,) in losses])


@pytest.mark.host  # one graph breaks as the other
def test_attention_is_left_out_of_graphs(cluster: Clusters) -> None:
    assert max(cluster(2).run(compiled_body, limit=100)) < 1e-6


def attention_body(context: Context) -> None:
    """The function itself: widths, masks, gradients, and what it refuses."""
    group, device = torch.distributed.group.WORLD, accelz.current().device
    assert group is not None
    torch.manual_seed(1)
    shapes = [(2, 4, LENGTH, 6), (2, 2, LENGTH, 6), (2, 2, LENGTH, 5)]
    whole = [torch.randn(shape, dtype=torch.double).to(device).requires_grad_() for shape in shapes]
    mine = [tokens.split(each.detach(), group, 2).clone().requires_grad_() for each in whole]
    for shape in ((LENGTH, LENGTH), (2, 1, 1, LENGTH), (2, 4, LENGTH, LENGTH)):
        mask = torch.randn(shape, dtype=torch.double).to(device)
        options: dict[str, Any] = {"attn_mask": mask, "scale": 0.3, "enable_gqa": True}
        expected = F.scaled_dot_product_attention(*whole, **options)
        found = ulysses.scaled_dot_product_attention(*mine, **options, group=group)
        torch.testing.assert_close(found, tokens.split(expected, group, 2))
        expected.square().sum().backward()
        found.square().sum().backward()
    for all_tokens, some in zip(whole, mine, strict=True):
        assert all_tokens.grad is not None
        torch.testing.assert_close(some.grad, tokens.split(all_tokens.grad, group, 2))
    query, key, value = mine
    with pytest.raises(zero.UsageError, match=r"mask of shape \(4, 4\) does not fit .* of 8 queries"):
        ulysses.scaled_dot_product_attention(
            query, key, value, torch.ones(4, 4).to(device), enable_gqa=True, group=group
        )
    with pytest.raises(zero.UsageError, match="4 heads of queries and 2 of keys need enable_gqa"):
        ulysses.scaled_dot_product_attention(query, key, value, group=group)
    with pytest.raises(zero.UsageError, match=r"expected queries of \(batch, heads"):
        ulysses.scaled_dot_product_attention(query[0], key[0], value[0], group=group)
    with pytest.raises(zero.ModelError, match="3 heads, which 2 ranks cannot share evenly"):
        ulysses.scaled_dot_product_attention(query[:, :3], key[:, :1], value[:, :1], group=group)
    layer = nn.MultiheadAttention(4, 2).to(device)
    x = torch.ones(3, 1, 4).to(device)
    with ulysses.Attention(group), pytest.raises(zero.ModelError, match="calls torch"):
        layer(x, x, x)


def test_attention_over_divided_sequences_is_that_of_whole_ones(cluster: Clusters) -> None:
    cluster(2).run(attention_body)


def recomputed_body(context: Context) -> None:
    """Gradients of attention that is repeated in the backward, which finds the function by either name."""
    group, device = torch.distributed.group.WORLD, accelz.current().device
    assert group is not None
    torch.manual_seed(2)
    whole = torch.randn(1, 2, LENGTH, 3, dtype=torch.double).to(device).requires_grad_()
    expected = F.scaled_dot_product_attention(whole, whole, whole, is_causal=True).square().sum()
    (gradient,) = torch.autograd.grad(expected, whole)

    def by_module(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def by_name(x: Tensor) -> Tensor:
        return imported_by_name(x, x, x, is_causal=True)

    for attend in (by_module, by_name):
        for reentrant in (False, True):
            mine = tokens.split(whole.detach(), group, 2).clone().requires_grad_()
            with ulysses.Attention(group):
                loss = checkpoint(attend, mine, use_reentrant=reentrant).square().sum()
                if not reentrant:
                    (found,) = torch.autograd.grad(loss, mine, retain_graph=True)
                    torch.testing.assert_close(found, tokens.split(gradient, group, 2))
                loss.backward()
            torch.testing.assert_close(mine.grad, tokens.split(gradient, group, 2))
            assert torch.overrides._len_torch_function_stack() == 0


def test_recomputed_attention_is_divided_however_it_was_imported(cluster: Clusters) -> None:
    cluster(2).run(recomputed_body)
