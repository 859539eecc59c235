"""The operations of a step, and how long it takes at least, beside numbers by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import accelz
import zero
from tests.zero.helpers.commands import refused, run
from zero.planning.plan import Plan

WIDTH, HEADS, WORDS = 64, 4, 100
ROWS, LENGTH = 3, 10
TOKENS = ROWS * LENGTH
SCORES = 2 * ROWS * LENGTH * LENGTH * WIDTH
"""Operations of the products of all heads' queries and keys, without a mask."""


def mlp(layers: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


class Block(nn.Module):
    def __init__(self, causal: bool, reentrant: bool | None, groups: int) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH // groups, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.causal, self.reentrant, self.groups = causal, reentrant, groups

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.layers(x)
        found: Tensor = checkpoint(self.layers, x, use_reentrant=self.reentrant)
        return found

    def layers(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        heads = HEADS // self.groups
        key, value = self.key_value(x).unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(
            query, key, value, is_causal=self.causal, enable_gqa=self.groups > 1
        )
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + gelu(self.down(self.up(x)))  # ends with what is not a product


class Transformer(nn.Module):
    """One whose head is not tied to its embedding."""

    def __init__(
        self, layers: int = 2, causal: bool = False, reentrant: bool | None = None, groups: int = 1
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(causal, reentrant, groups) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x).flatten(0, 1), input_ids.flatten())


def planned(model: nn.Module, batch: Tensor | None = None, ranks: int = 2, **settings: Any) -> Plan:
    rates = {name: settings.pop(name) for name in RATES if name in settings}
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    return zero.plan(model, optimizer, zero.Config(**settings), ranks=ranks, batch=batch, **rates)


RATES = ("peak_flops", "link_bandwidth", "host_bandwidth")


def counted(model: nn.Module, **settings: Any) -> tuple[int, int, int]:
    tokens = torch.empty(ROWS, LENGTH, dtype=torch.int64, device="meta")
    vectors = torch.empty(TOKENS, WIDTH, device="meta")
    flops = planned(model, tokens if isinstance(model, Transformer) else vectors, **settings).flops
    assert flops is not None
    assert flops.all == flops.model + flops.recomputed == flops.forward + flops.backward + flops.recomputed
    return flops.forward, flops.backward, flops.recomputed


def products(model: nn.Module) -> int:
    """Operations of a forward's products with weights: two for each weight and token."""
    return 2 * TOKENS * sum(p.numel() for name, p in model.named_parameters() if name != "table.weight")


def test_operations_of_an_mlp() -> None:
    """Two for each weight and row; as many again for gradients of weights, and of inputs but the first's."""
    layer = 2 * TOKENS * WIDTH * WIDTH
    assert counted(mlp()) == (4 * layer, (2 * 4 - 1) * layer, 0)
    assert counted(mlp(), precision="bf16") == (4 * layer, (2 * 4 - 1) * layer, 0)
    assert counted(mlp(), gradient_accumulation_steps=3) == (12 * layer, 3 * 7 * layer, 0)


def test_frozen_layers_have_no_gradients() -> None:
    """A backward ends where nothing below is trained, and passes through what is frozen above."""
    layer, model = 2 * TOKENS * WIDTH * WIDTH, mlp()
    model[0].requires_grad_(False)
    assert counted(model) == (4 * layer, (2 * 3 - 1) * layer, 0)
    model[2].requires_grad_(False)
    assert counted(model) == (4 * layer, 4 * layer, 0)


def test_operations_of_a_transformer() -> None:
    """Six for each weight and token, and attention: two products of scores, and five in a backward, which
    makes the scores again; half of them under a causal mask."""
    model = Transformer()
    weights = products(model)
    assert counted(model) == (weights + 2 * 2 * SCORES, 2 * weights + 2 * 5 * SCORES, 0)
    causal = counted(Transformer(causal=True))
    assert causal == (weights + 2 * SCORES, 2 * weights + 5 * SCORES, 0)
    grouped = Transformer(groups=2)
    assert counted(grouped)[0] == products(grouped) + 2 * 2 * SCORES


def test_what_is_recomputed_is_no_model_operation() -> None:
    """Of blocks, and not of the head. One kind of checkpoint stops once it has what the backward needs."""
    plain, head = counted(Transformer()), 2 * TOKENS * WIDTH * WORDS
    for reentrant in (True, False):
        assert counted(Transformer(reentrant=reentrant)) == (*plain[:2], plain[0] - head)


def test_the_time_of_each_part() -> None:
    batch = torch.empty(TOKENS, WIDTH, device="meta")
    host = {"optimizer": "host", "params": "host"}
    plan = planned(mlp(), batch, 4, peak_flops=2e9, link_bandwidth=3e6, host_bandwidth=5e5, offload=host)
    assert plan.flops is not None
    assert plan.time is not None
    matrices = 4 * 4 * WIDTH * WIDTH
    gathered, reduced = plan.traffic.collectives["all_gather"], plan.traffic.collectives["reduce_scatter"]
    assert reduced == matrices
    assert plan.time.compute == 11 * 2 * TOKENS * WIDTH * WIDTH / 2e9
    assert plan.time.link == pytest.approx((gathered + reduced) * 3 / 4 / 3e6)
    assert plan.time.host == max(plan.traffic.to_host, plan.traffic.to_device) / 5e5
    assert plan.time.overlapped == plan.time.link
    assert plan.time.in_turn == pytest.approx(plan.time.compute + plan.time.link + plan.time.host)
    assert plan.time.bound_by == "link"
    assert plan.time.balanced_batch == plan.time.link / plan.time.compute


@pytest.mark.parametrize(
    ("settings", "times"),
    [
        pytest.param({"stage": 0}, 2 * 3 / 4, id="an all-reduce"),
        pytest.param({"stage": 2}, (1 + 1) * 3 / 4, id="reduced, then gathered"),
        pytest.param({"stage": 3, "gradient_accumulation_steps": 4}, (4 + 4) * 3 / 4, id="micro-batches"),
        pytest.param(
            {"stage": 3, "gradient_accumulation_steps": 4, "accumulate": "local"},
            (1 + 4) * 3 / 4,
            id="reduced once",
        ),
        pytest.param({"stage": 3, "shard_ranks": 2}, (1 + 1) / 2 + 2 / 2 / 2, id="two copies"),
    ],
)
def test_what_four_ranks_send(settings: dict[str, Any], times: float) -> None:
    """Of rings: all but its own part of a buffer, in an all-reduce twice; copies add up a half of one."""
    sent = planned(mlp(), ranks=4, link_bandwidth=1e6, **settings).time
    assert sent is not None
    assert sent.link == pytest.approx(times * 4 * 4 * WIDTH * WIDTH / 1e6)


def test_a_batch_so_many_times_as_large_is_balanced() -> None:
    rates = {"peak_flops": 1e9, "link_bandwidth": 1e6}
    first = planned(mlp(), torch.empty(TOKENS, WIDTH, device="meta"), **rates).time
    assert first is not None
    assert first.balanced_batch is not None
    rows = math.ceil(TOKENS * first.balanced_batch)
    balanced = planned(mlp(), torch.empty(rows, WIDTH, device="meta"), **rates).time
    assert balanced is not None
    assert balanced.bound_by == "compute"
    assert balanced.balanced_batch is None
    assert balanced.link == first.link == pytest.approx(balanced.compute, rel=1 / rows)


def test_what_is_not_known_has_no_time() -> None:
    batch = torch.empty(TOKENS, WIDTH, device="meta")
    assert planned(mlp()).flops is None
    assert planned(mlp(), batch).time is None
    links = planned(mlp(), link_bandwidth=1e6).time
    assert links is not None
    assert (links.compute, links.host, links.parts) == (None, None, {"link": links.in_turn})
    alone = planned(mlp(), batch, ranks=1, peak_flops=1e9, link_bandwidth=1e6).time
    assert alone is not None
    assert (alone.link, alone.bound_by, alone.balanced_batch) == (0, "compute", None)


def test_rates_that_are_declared_take_the_place_of_those_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, accelerator = torch.empty(TOKENS, WIDTH, device="meta"), accelz.current()
    declared = replace(accelerator.capabilities, peak_flops=1e9, link_bandwidth=1e6)
    monkeypatch.setattr(accelerator, "capabilities", declared)
    assert planned(mlp(), batch).time == planned(mlp(), batch, peak_flops=1e9, link_bandwidth=1e6).time
    faster, told = (planned(mlp(), batch, link_bandwidth=rate).time for rate in (2e6, 1e6))
    assert faster is not None
    assert told is not None
    assert faster.link == told.link / 2 if told.link else None


def test_one_rank_is_not_bound_by_what_ranks_send_each_other() -> None:
    plan = planned(mlp(), ranks=1, link_bandwidth=1e9)
    assert plan.time is None
    assert "bound by" not in str(plan)


@pytest.mark.parametrize("rate", [0, -1.0, math.nan, math.inf, True, "450GB"])
def test_what_is_no_rate_is_refused(rate: Any) -> None:
    batch = torch.empty(TOKENS, WIDTH, device="meta")
    for name in RATES:
        with pytest.raises(zero.UsageError, match=f"^{name}=.* must be a number above 0"):
            planned(mlp(), batch, **{name: rate})


def test_a_peak_needs_a_batch() -> None:
    with pytest.raises(zero.UsageError, match="is for the operations of a batch: give one too"):
        planned(mlp(), peak_flops=1e12)


SCRIPT = """
import torch

class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)

    def forward(self, input_ids):
        return self.head(self.table(input_ids))
"""


def test_the_command_tells_operations_and_time(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(SCRIPT)
    line = ["plan", f"{tmp_path}/words.py:Words", "-n", 2, "--batch", 2, "--sequence", 5]
    line += ["--peak-flops", "1e6", "--link-bandwidth", "10kB"]
    numbers = json.loads(run(*line, "--json").stdout)
    assert numbers["flops"] == {"forward": 640, "backward": 1280, "recomputed": 0}
    times = numbers["time"]
    assert times["compute"] == 1920e-6
    assert (times["overlapped"], times["in_turn"]) == (times["link"], times["compute"] + times["link"])
    assert (times["host"], times["bound_by"]) == (None, "link")
    text = run(*line).stdout
    for told in ("operations per optimizer step  1.92e+03", "computing", "1.92 ms", "times as large"):
        assert told in text
    assert "bound by what ranks send each other; a batch" in text
    table = run(*line, "--compare").stdout.splitlines()
    assert table[0].endswith("least time")
    assert all(row.endswith("ms") for row in table[1:])
    without = run("plan", f"{tmp_path}/words.py:Words", "-n", 2).stdout
    assert "time" not in without
    assert "--batch and --sequence" in refused(*line[:4], "--peak-flops", "1e6")
    assert "'-5' is not a size" in refused(*line[:4], "--link-bandwidth", "-5")
    assert "peak_flops=-5.0" in refused(*line[:8], "--peak-flops", "-5")
