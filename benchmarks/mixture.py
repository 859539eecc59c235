"""A Mixtral-like model made of the decoder: 16 experts in each block, of which a token goes to two.

Ranks of an "ep" group have equally many of the experts, and tokens travel to them and back by two
all-to-alls. An expert's MLP has an eighth of the decoder's hidden features, so that two are a quarter of its
work.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F

from benchmarks.model import Block, Decoder

EXPERTS, CHOSEN, SLIMMER = 16, 2, 8


class Experts(nn.Module):
    """The experts of one rank. gate, up: [experts, width, hidden]. down: [experts, hidden, width]."""

    def __init__(self, width: int, hidden: int, numbers: range, block: int) -> None:
        super().__init__()

        def drawn(rows: int, columns: int, which: int) -> nn.Parameter:
            """Each expert's values are the same in a group of any size."""
            seeds = (1 + which + 3 * (number + EXPERTS * block) for number in numbers)
            each = [torch.randn(rows, columns, generator=_generator(seed)) for seed in seeds]
            return nn.Parameter(0.02 * torch.stack(each))

        self.gate, self.up = drawn(width, hidden, 0), drawn(width, hidden, 1)
        self.down = drawn(hidden, width, 2)

    def forward(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """tokens: [n, width], as many for each expert in turn as `counts` says."""
        found = [
            (F.silu(x @ gate) * (x @ up)) @ down
            for x, gate, up, down in zip(tokens.split(counts), self.gate, self.up, self.down, strict=True)
        ]
        return torch.cat(found)


class MixtureBlock(nn.Module):
    """A block of the decoder with experts in place of its MLP. group: the ranks that have experts of their
    own."""

    def __init__(self, block: Block, number: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        hidden, width = block.up.weight.shape
        self.attention_norm, self.attention, self.mlp_norm = (
            block.attention_norm,
            block.attention,
            block.mlp_norm,
        )
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.router.weight.data.normal_(std=0.02, generator=_generator(number))
        each = EXPERTS // group.size()
        first = each * group.rank()
        self.experts = Experts(width, hidden // SLIMMER, range(first, first + each), number)
        self._group = group

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self._mixed(self.mlp_norm(x).flatten(0, 1)).view_as(x)

    def _mixed(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(CHOSEN)
        order = chosen.flatten().argsort(stable=True)
        sent = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        by_source = received.view(self._group.size(), -1)  # and by this rank's experts
        there, here = sent.view(by_source.shape).sum(1).tolist(), by_source.sum(1).tolist()
        tokens = all_to_all_single_autograd(x[order // CHOSEN], here, there, self._group)
        expert = torch.arange(by_source.shape[1]).repeat(len(here)).repeat_interleave(received)
        by_expert = expert.argsort(stable=True)
        out = self.experts(tokens[by_expert], by_source.sum(0).tolist())
        back = all_to_all_single_autograd(out[by_expert.argsort()], there, here, self._group)
        share = weights.flatten()[order].to(x.dtype).unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // CHOSEN, back * share)


def to_mixture(model: Decoder, group: dist.ProcessGroup) -> None:
    """Give the decoder's blocks experts, of which this rank has its part. On the host."""
    for number, block in enumerate(model.blocks):
        model.blocks[number] = MixtureBlock(block, number, group)  # type: ignore[arg-type]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
