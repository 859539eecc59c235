"""Models put together at random from parts that are hard to shard."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

VOCABULARY = 23
KINDS = (
    "mlp",
    "frozen",
    "attention",
    "conv",
    "experts",
    "in place",
    "nested",
    "aside",
    "tupled",
    "half",
    "adapted",
    "norm only",
    "all frozen",
    "unseen",
    "hooked",
    "keyword",
    "dropped",
)
BY_RANK = ("experts", "dropped")
"""Kinds that use other parameters on each rank."""
MOODS = ("steady", "steady", "skips", "cuts", "reverses", "beside")
RECOMPUTE = ("", "", "", "reentrant", "not reentrant")


@dataclass(frozen=True)
class Recipe:
    """What a model is made of. order: which part is called when; parts may be called twice, or never. lends:
    after which place in the order the norm of which part is called once more, past that part."""

    width: int
    kinds: tuple[str, ...]
    order: tuple[int, ...]
    recompute: tuple[str, ...]
    tied: bool
    mood: str
    frozen_embedding: bool
    from_root: bool
    lends: tuple[tuple[int, int], ...]

    @classmethod
    def draw(cls, rng: random.Random) -> Recipe:
        kinds = tuple(rng.choice(KINDS) for _ in range(rng.randint(1, 5)))
        order = list(range(len(kinds)))
        if rng.random() < 0.3:
            order.append(rng.choice(order))
        if rng.random() < 0.2:
            order.pop(rng.randrange(len(order)))
        dropped = "dropped" in kinds  # gradients have to come by, also where it is dropped
        return cls(
            width=4 * rng.randint(2, 5),
            kinds=kinds,
            order=tuple(order),
            recompute=tuple(rng.choice(RECOMPUTE) for _ in order),
            tied=rng.random() < 0.5,
            mood=rng.choice([mood for mood in MOODS if not (dropped and mood == "cuts")]),
            frozen_embedding=rng.random() < 0.25 and not dropped,
            from_root=rng.random() < 0.3,
            lends=tuple(
                (rng.randrange(len(kinds)), rng.randrange(len(kinds)))
                for _ in range(rng.choice((0, 0, 0, 1, 2)))
            ),
        )

    @property
    def by_rank(self) -> bool:
        """Whether ranks use other parameters in some steps."""
        return any(kind in BY_RANK for kind in self.kinds)

    def traceable(self) -> Recipe:
        """Without what is something else in a graph: hooks of parameters, reentrant checkpointing, units that
        only some ranks use."""
        return replace(
            self,
            kinds=tuple("mlp" if kind in ("hooked", "dropped") else kind for kind in self.kinds),
            recompute=tuple("not reentrant" if again else "" for again in self.recompute),
        )


class Part(nn.Module):
    """A residual part of one kind."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 3, bias=kind != "in place")
        self.down = nn.Linear(2 * width + 3, width)
        self.kept: Tensor | None = None
        if kind == "frozen":
            self.up.requires_grad_(False)
        if kind in ("adapted", "norm only", "all frozen"):
            self.requires_grad_(False)
            self.norm.requires_grad_(kind == "norm only")
        if kind == "adapted":
            self.lora_a = nn.Linear(width, 2, bias=False)
            self.lora_b = nn.Linear(2, 2 * width + 3, bias=False)
        if kind == "hooked":
            self.up.register_forward_hook(lambda module, inputs, output: output * 0.5)
            self.up.weight.register_hook(lambda gradient: gradient * 2)
            self.register_full_backward_hook(lambda module, into, out: None)
        if kind == "attention":
            self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        if kind == "conv":
            self.conv = nn.Conv2d(width, width, 3, padding=1, groups=2).to(memory_format=torch.channels_last)
        if kind == "experts":
            self.router = nn.Linear(width, 3)
            self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        if kind == "nested":
            self.inner = nn.ModuleList(Part("mlp", width) for _ in range(2))
        if kind == "half":
            self.gain = nn.Parameter(torch.tensor(0.7))
            self.turned = nn.Parameter(torch.eye(width).mul(0.9).t())
            self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor, chosen: int) -> Tensor | tuple[Tensor, Tensor]:
        if self.kind == "dropped" and chosen == 0:
            return x
        h = self.norm(x)
        if self.kind == "attention":
            h = self.attention(h, h, h, need_weights=False)[0]
        if self.kind == "conv":
            h = self.conv(h.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
        if self.kind == "experts":
            weight = self.router(h).softmax(-1)[..., chosen : chosen + 1]
            h = self.experts[chosen](h) * weight
        if self.kind == "half":
            h = (h @ self.turned) * self.gain + self.empty.sum().to(h.dtype)
        for inner in getattr(self, "inner", ()):
            h = inner(h, chosen)
        y = self.up(h)
        if self.kind == "adapted":
            y = y + self.lora_b(self.lora_a(h))
        y = y.tanh_() if self.kind == "in place" else torch.tanh(y)
        y = x + self.down(y)
        if self.kind == "aside":
            self.kept = y.float().square().mean()
        return (y, h) if self.kind == "tupled" else y


class Mosaic(nn.Module):
    """Embedding, parts, head; a loss comes out."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.embedding = nn.Embedding(VOCABULARY, recipe.width)
        self.parts = nn.ModuleList(Part(kind, recipe.width) for kind in recipe.kinds)
        self.norm = nn.LayerNorm(recipe.width)
        self.head = nn.Linear(recipe.width, VOCABULARY, bias=False)
        if recipe.frozen_embedding:
            self.embedding.requires_grad_(False)
        if recipe.from_root:
            self.between = nn.Linear(recipe.width, recipe.width).requires_grad_(recipe.width > 12)
        if recipe.tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, recipe.width))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def call(self, part: Part, again: str, x: Tensor, chosen: int) -> Tensor:
        if part.kind == "unseen":
            with torch.no_grad():
                y = part(x, chosen)
            return x + y
        if again and part.kind != "aside":
            x = checkpoint(part, x, chosen, use_reentrant=again == "reentrant")
        else:
            x = part(chosen=chosen, x=x) if part.kind == "keyword" else part(x, chosen)
        return x[0] if isinstance(x, tuple) else x

    def path(self, step: int) -> tuple[tuple[int, str], ...]:
        path = tuple(zip(self.recipe.order, self.recipe.recompute, strict=True))
        if self.recipe.mood == "skips" and step % 3 == 1:
            return path[:-1]
        return path[::-1] if self.recipe.mood == "reverses" and step % 3 == 2 else path

    def forward(self, tokens: Tensor, chosen: int, step: int = 0) -> dict[str, Tensor]:
        x = self.embedding(tokens)
        x = x + self.shift.to(x.dtype)
        aside, into = [], x
        for place, (at, again) in enumerate(self.path(step)):
            part = self.parts[at]
            if self.recipe.mood == "cuts" and step % 3 == 1 and place == 1:
                x = x.detach()
            if self.recipe.mood == "beside":
                x = x + 0.5 * self.call(part, again, into, chosen)
            else:
                x = self.call(part, again, x, chosen)
            if place == 0 and self.recipe.from_root:
                x = torch.tanh(self.between(x))
            if part.kind == "aside":
                aside.append(part.kept)
            for lender in (lender for after, lender in self.recipe.lends if after == place):
                x = x + 0.3 * torch.tanh(self.parts[lender].norm(x))
        if self.training:
            self.seen += 1
        logits = self.head(self.norm(x)).float()
        loss = cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return {"loss": loss + 0.01 * sum(aside), "logits": logits}


def batch(step: int, rank: int) -> tuple[Tensor, int, int]:
    """Tokens of one rank, which expert they go to, of 3, so ranks differ in some steps, and the step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (2, 6), generator=generator)
    return tokens, (step + (rank if step % 3 == 0 else 0)) % 3, step
