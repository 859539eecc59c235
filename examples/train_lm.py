"""Train a byte-level language model on Python's own sources, sharded over the ranks of the job.

    torchrun --standalone --nproc-per-node 2 examples/train_lm.py

What zero asks of a training script is one line, `zero.initialize`; the loop is plain PyTorch. The global
batch of a step depends on the seed and the step only, and every rank takes its share of it: the losses are
the same on any number of ranks and at any stage, up to the rounding of sums.
"""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Literal, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import accelz
import zero
from lm_data import load_corpus, shares, training_rows, validation_rows
from lm_model import LanguageModel
from lm_settings import Settings, parse
from zero.observe import Console, JsonLines

WARMUP = 20  # steps
FINAL_RATE = 0.05  # of the peak learning rate
WEIGHT_DECAY = 0.1
TEMPERATURE = 0.7  # of the sample: below 1 prefers likely bytes
KEPT = 2  # checkpoints
TRACED_STEP = 3  # of a run: the first that is like all later ones
TIMEOUT = 120.0  # seconds a rank waits for the others


class Run:
    """All the state of a training run."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        if settings.offload == "disk":
            settings.swap.mkdir(parents=True, exist_ok=True)
        self.corpus = load_corpus(settings.shape.context, settings.max_bytes)
        config = zero.Config(stage=settings.stage, precision=settings.precision, offload=tiers(settings))
        torch.manual_seed(settings.seed)
        with zero.init(config):  # no rank ever holds the whole model
            self.model = LanguageModel(settings.shape)
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model), lr=settings.lr, betas=(0.9, 0.95))
        self.scheduler = LambdaLR(self.optimizer, lambda step: learning_rate(step, settings.steps))
        self.engine = zero.initialize(self.model, self.optimizer, config)  # the one line
        self.ranks = Ranks()
        self.start = self.restore() if settings.resume else 0
        self.console = Console(settings.steps, show=("validation_loss",))

    def train(self) -> None:
        """Run all steps, with validation and checkpoints in between; save the weights and draw a sample."""
        settings, began, stop = self.settings, time.perf_counter(), self.settings.last_step
        self.say_hello()
        metrics = JsonLines(settings.out / "metrics.jsonl")
        with self.engine.observe(self.console, metrics, flops_per_token=self.count_flops()):
            for step in range(self.start + 1, stop + 1):
                if step == self.start + TRACED_STEP:
                    self.engine.trace_memory()  # the report shows this step's memory
                self.train_step(step)
                if due(step, settings.eval_every, stop):
                    loss = self.validate()
                    self.engine.log(validation_loss=loss)
                if due(step, settings.save_every, stop):
                    self.save(step)
            self.engine.wait_for_checkpoint()  # it is observed, too
        self.write_weights()
        self.say(
            f"{loss / math.log(2):.3f} bits per byte of text that was held out, after {stop} steps and "
            f"{time.perf_counter() - began:.0f} s; peak memory {megabytes(self.ranks.memory())}"
        )
        self.say(f"weights and checkpoints: {settings.out}")
        self.say(f"to see what this run did: {os.path.relpath(sys.executable)} -m zero report {settings.out}")
        if settings.sample_bytes:
            self.say("sample:\n" + self.sample())

    def count_flops(self) -> float:
        """Floating-point operations of the model for a byte, for the share of the device's peak (MFU)."""
        rows = torch.zeros(1, self.settings.context + 1, dtype=torch.long, device=self.engine.device)
        return self.engine.count_flops(rows[:, :-1], rows[:, 1:]) / self.settings.context

    def train_step(self, step: int) -> None:
        """Take one optimizer step, on the global batch of `step`."""
        settings, engine = self.settings, self.engine
        batch = training_rows(self.corpus.train, settings.shape.context, settings.batch, settings.seed, step)
        total = torch.zeros((), device=engine.device)
        for rows in shares(batch, settings.accumulate, engine.rank, engine.world_size):
            loss = self.loss(rows) / settings.accumulate
            loss.backward()
            total += loss.detach()
        if settings.clip:
            engine.clip_grad_norm_(settings.clip)  # or torch.nn.utils.clip_grad_norm_(parameters, clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        tokens = settings.batch * settings.shape.context // engine.world_size
        peaks = {f"memory/rank{rank}": peak for rank, peak in enumerate(self.ranks.memory())}
        engine.log(loss=self.ranks.mean(total), tokens=tokens, **peaks)

    def loss(self, rows: Tensor) -> Tensor:
        """Mean loss in nats per byte of `rows` [rows, context + 1]."""
        rows = rows.to(self.engine.device)
        return self.model(rows[:, :-1], rows[:, 1:])

    @torch.no_grad()
    def validate(self) -> float:
        """Loss over windows spread evenly over the validation files, in batches as in training."""
        settings, engine = self.settings, self.engine
        parts = math.ceil(settings.eval_bytes / (settings.batch * settings.shape.context))
        rows = validation_rows(self.corpus.validation, settings.shape.context, parts * settings.batch)
        engine.eval()
        losses = [self.loss(share) for share in shares(rows, parts, engine.rank, engine.world_size)]
        engine.train()
        return self.ranks.mean(torch.stack(losses).mean()).item()

    def save(self, step: int) -> None:
        """Save a checkpoint to resume from: the engine's own state, and what only this script knows.

        Batches are a function of the seed and the step, so the step is all that the order of the data needs.
        """
        state = {"step": step, "shape": vars(self.settings.shape), "scheduler": self.scheduler}
        path = self.settings.checkpoints / f"step-{step}"
        self.engine.save_checkpoint(path, state, keep_last=KEPT, async_=True)

    def restore(self) -> int:
        """Load the newest checkpoint; returns the step it was made after."""
        loaded = self.engine.load_checkpoint(self.settings.checkpoints, restore={"scheduler": self.scheduler})
        if loaded.state["shape"] != vars(self.settings.shape):
            raise ValueError(
                f"the checkpoint's model is {loaded.state['shape']}, not {vars(self.settings.shape)}"
            )
        return int(loaded.state["step"])

    def write_weights(self) -> None:
        """Save the whole model in one file, for use without zero; tied weights under their first name."""
        state = self.engine.state_dict()  # collective; empty except on rank 0
        if state:
            names = {name for name, _ in self.model.named_parameters()}
            whole = {name: state[name].contiguous() for name in names}
            save_file(whole, self.settings.out / "model.safetensors", {"format": "pt"})

    @torch.no_grad()
    def sample(self) -> str:
        """Sample text from the model after the prompt. Every rank takes part and draws the same bytes."""
        settings = self.settings
        generator = torch.Generator().manual_seed(settings.seed)
        text = list(settings.prompt.encode())
        self.engine.eval()
        with zero.gathered(self.model):  # gathered once, not once for every byte
            for _ in range(settings.sample_bytes):
                seen = torch.tensor([text[-settings.shape.context :]], device=self.engine.device)
                likely = (self.engine(seen)[0, -1].cpu() / TEMPERATURE).softmax(-1)
                text.append(int(torch.multinomial(likely, 1, generator=generator)))
        self.engine.train()
        return bytes(text).decode(errors="replace")

    def say_hello(self) -> None:
        settings, parameters = self.settings, sum(p.numel() for p in self.model.parameters())
        self.say(
            f"{parameters / 1e6:.1f} M parameters, stage {settings.stage}, {settings.precision}, "
            f"{self.engine.world_size} x {self.engine.accelerator.name}; {len(self.corpus.train) / 1e6:.1f} "
            f"MB to train on, {len(self.corpus.validation) / 1e6:.1f} MB held out"
            + (f"; resuming after step {self.start}" if self.start else "")
        )

    def say(self, text: str) -> None:
        if self.engine.rank == 0:
            self.console.console.print(text, soft_wrap=True, markup=False)


def tiers(settings: Settings) -> zero.Offload | Literal["auto"] | None:
    """What zero is told about --offload."""
    if settings.offload == "disk":
        return zero.Offload(optimizer="disk", path=settings.swap)
    if settings.offload == "host":
        return zero.Offload(optimizer="host")
    return "auto" if settings.offload == "auto" else None


class Ranks:
    """Collects numbers from all ranks."""

    def __init__(self) -> None:
        self._accelerator = accelz.current()
        group = self._accelerator.collectives.new_group(None, TIMEOUT)
        assert group is not None
        self._group = group

    def mean(self, value: Tensor) -> Tensor:
        """Mean over the ranks of a scalar, on the device."""
        value = value.detach().clone()
        self._accelerator.collectives.all_reduce(value, self._group)
        return value / self._group.size

    def memory(self) -> list[int]:
        """Peak memory of each rank, in bytes, as its device counts it."""
        peaks = torch.zeros(self._group.size, dtype=torch.int64)
        peaks[self._group.rank] = self._accelerator.memory.stats().peak
        self._accelerator.collectives.all_reduce(peaks, self._group)
        return peaks.tolist()


def megabytes(memory: list[int]) -> str:
    """Bytes of each rank as "412 + 409 MB"."""
    return " + ".join(f"{n / 1e6:.0f}" for n in memory) + " MB"


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    """Weight decay for matrices, none for the scales of norms."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def learning_rate(step: int, steps: int) -> float:
    """Fraction of the peak rate: linear warmup, then a cosine down to FINAL_RATE."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    progress = (step - WARMUP) / max(1, steps - WARMUP)
    return FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2


def due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def fail(error: Exception) -> NoReturn:
    """Exit with a message. torchrun stops all ranks when one ends: only ranks that rank 0 has not ended by
    then have an error that it does not have.
    """
    rank = int(os.environ.get("RANK", "0"))
    time.sleep(5 if rank else 0)
    print(f"error: {error}{f' [rank {rank}]' if rank else ''}", file=sys.stderr, flush=True)
    sys.exit(2)


def main() -> None:
    try:
        settings = parse(sys.argv[1:])
        settings.check_ranks(int(os.environ.get("WORLD_SIZE") or "1"))
        run = Run(settings)
    except (ValueError, zero.ZeroError, accelz.AccelzError) as error:
        fail(error)
    run.train()


if __name__ == "__main__":
    main()
