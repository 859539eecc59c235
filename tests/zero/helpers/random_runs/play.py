"""A drawn run, played by an engine beside training without any of it."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero
from accelz.conformance.cluster import Context
from tests.zero.helpers.loops import Training
from tests.zero.helpers.random_runs.drawn import Drawn, optimizer_of
from tests.zero.helpers.random_runs.mosaic import Part, batch
from tests.zero.helpers.random_runs.plain import Plain
from tests.zero.helpers.random_runs.settings import draw_settings
from tests.zero.helpers.training import check_order


class Planned(Exception):
    """What a hook of the user's raises."""


def _raise(*_: Any) -> None:
    raise Planned


class Play:
    """One drawn run on one rank. told: the settings of its engines, and what was done."""

    def __init__(self, context: Context, drawn: Drawn, folder: Path) -> None:
        self.context, self.drawn, self.folder = context, drawn, folder
        self.rng = random.Random(drawn.seed + 1)
        self.plain = Plain(drawn, drawn.model(drawn.seed), context.size)
        self.told: list[object] = [drawn]
        self.errors = {"loss": 0.0, "norm": 0.0, "state": 0.0, "gradient": 0.0}
        self.frozen: str | None = None
        self.saved = 0

    def start(self, seed: int, load: Path | None = None) -> None:
        """An engine with other settings than the one before."""
        settings = draw_settings(self.rng, self.drawn, self.context.size, self.folder)
        self.told.append(settings)
        config = self.drawn.config(settings)
        with zero.init(config) if self.rng.random() < 0.3 else nullcontext():
            self.model = self.drawn.model(seed)
        self.training = Training(self.model, optimizer_of(self.drawn.optimizer, self.model), config)
        self.engine = self.training.engine
        if load is not None:
            self.engine.load_checkpoint(load)

    def worse(self, what: str, got: float, expected: float, scale: float | None = None) -> None:
        error = abs(got - expected) / max(abs(expected) if scale is None else scale, 1e-3)
        self.errors[what] = max(self.errors[what], error if error == error else float("inf"))

    def run(self) -> dict[str, float]:
        """The largest errors."""
        self.start(self.drawn.seed)
        step = 0
        for action in self.drawn.actions:
            self.told.append(action)
            getattr(self, "do_" + action.replace(" ", "_"))(step)
            for _ in range(self.drawn.accumulation):
                self.micro_batch(step)
                step += 1
        self.compare_state()
        return self.errors

    def loss(self, step: int) -> Tensor:
        tokens, chosen, step = batch(step, self.context.rank)
        device = self.engine.accelerator.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.drawn.autocast):
            value: Tensor = self.engine(tokens.to(device), chosen, step)["loss"]
        return value

    def micro_batch(self, step: int, stepping: bool = True) -> None:
        value = self.loss(step)
        self.training.backward(value)
        expected = self.plain.backward(step)
        self.worse("loss", value.item(), expected[self.context.rank], scale=3.0)
        if not stepping:
            return
        norm = self.plain.step()
        if self.training.step() and norm is not None:
            assert self.engine.grad_norm is not None
            self.worse("norm", float(self.engine.grad_norm), norm)

    def compare_state(self) -> None:
        check_order(self.engine)
        state = self.engine.state_dict(master=True)
        if self.context.rank:
            return
        expected = {k: v for k, v in self.plain.masters.state_dict().items() if k != "seen"}
        assert [k for k in state if k != "seen"] == list(expected)
        for name, value in expected.items():
            if value.numel() and self.drawn.optimizer != "lion":  # its steps have a size of their own
                got = state[name].double() - value.double()
                self.worse("state", float(got.abs().max()), 0.0, scale=float(value.abs().max()))

    # -- what is done between steps ----------------------------------------------------------------

    def do_nothing(self, step: int) -> None:
        pass

    def do_rate(self, step: int) -> None:
        for group in [*self.engine.optimizer.param_groups, *self.plain.param_groups()]:
            group["lr"] *= 0.7

    def do_decay(self, step: int) -> None:
        for group in [*self.engine.optimizer.param_groups, *self.plain.param_groups()]:
            if "weight_decay" in group:
                group["weight_decay"] = 0.02

    def do_switch(self, step: int) -> None:
        """To another engine with other settings, through a checkpoint."""
        self.saved += 1
        path = self.folder / f"run-{self.saved}"
        self.engine.save_checkpoint(path, async_=self.rng.random() < 0.3)
        self.engine.wait_for_checkpoint()
        del self.engine, self.model
        self.start(self.drawn.seed + 100, path)
        self.refreeze()

    def refreeze(self) -> None:
        if self.frozen is not None:
            dict(self.model.named_parameters())[self.frozen].requires_grad_(False)

    def do_load_here(self, step: int) -> None:
        self.saved += 1
        path = self.folder / f"run-{self.saved}"
        self.engine.save_checkpoint(path)
        with zero.gathered(self.model, write_rank=0), torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1.0)
        if self.rng.random() < 0.5:
            self.training.backward(self.loss(step))
        self.engine.load_checkpoint(path)

    def do_write(self, step: int) -> None:
        part = self.rng.choice(["parts.0", "norm", "embedding", ""])
        with zero.gathered(self.model.get_submodule(part), write_rank=0), torch.no_grad():
            for parameter in self.model.get_submodule(part).parameters():
                parameter.mul_(0.5)
        for parameter in self.plain.masters.get_submodule(part).parameters():
            parameter.data.mul_(0.5)
            if self.plain.narrow:
                parameter.data = parameter.data.bfloat16().float()
        self.plain.refresh()

    def do_state_dict(self, step: int) -> None:
        state = self.engine.state_dict(master=True)
        self.engine.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in state.items()})
        for parameter in self.plain.masters.parameters():
            parameter.data.mul_(0.5)
        for name, buffer in self.plain.masters.named_buffers():
            if buffer.is_floating_point():
                buffer.mul_(0.5)
                if self.plain.narrow:
                    self.plain.model.get_buffer(name).mul_(0.5)
        self.plain.refresh()

    def do_away(self, step: int) -> None:
        self.engine.offload_states()
        if self.rng.random() < 0.5:
            self.compare_state()
        self.engine.reload_states()

    def do_evaluate(self, step: int) -> None:
        self.engine.eval()
        with torch.no_grad() if self.rng.random() < 0.5 else torch.inference_mode():
            self.worse("loss", self.loss(step).item(), self.plain.loss(step, self.context.rank).item())
        self.engine.train()

    def do_generate(self, step: int) -> None:
        with zero.gathered(self.model), torch.no_grad():
            for _ in range(2):
                self.worse("loss", self.loss(step).item(), self.plain.loss(step, self.context.rank).item())

    def do_freeze(self, step: int) -> None:
        """Freeze one for a while, or unfreeze it."""
        models = [self.model, self.plain.masters, self.plain.model]
        if self.frozen is not None:
            for model in models:
                dict(model.named_parameters())[self.frozen].requires_grad_(True)
            self.frozen = None
            return
        names = [n for n, p in self.plain.masters.named_parameters() if p.requires_grad]
        self.frozen = self.rng.choice([n for n in names if n != "embedding.weight"])
        for model in models:
            dict(model.named_parameters())[self.frozen].requires_grad_(False)

    def fails(self, module: nn.Module, step: int, backward: bool) -> None:
        hook = (
            module.register_full_backward_hook(_raise) if backward else module.register_forward_hook(_raise)
        )
        try:
            self.training.backward(self.loss(step))
        except Planned:
            pass
        finally:
            hook.remove()

    def anywhere(self) -> nn.Module:
        """A module that runs on all ranks."""
        called = [self.model.norm, *(part for part in self.called() if part.kind != "dropped")]
        modules = [m for part in called for n, m in part.named_modules() if "experts" not in n]
        return self.rng.choice([m for m in modules if not isinstance(m, nn.ModuleList)])

    def called(self) -> list[Part]:
        return [self.model.parts[i] for i in self.model.recipe.order]

    def do_forward_fails(self, step: int) -> None:
        self.fails(self.anywhere(), step, backward=False)
        self.engine.zero_grad()

    def do_backward_fails(self, step: int) -> None:
        """Not where ranks that leave out units of others have come further in their reductions than those."""
        if self.drawn.recipe.by_rank and self.engine.config.stage < 3:
            return
        norms = [part.norm for part in self.called() if part.kind != "dropped"]
        self.fails(self.rng.choice([self.model.norm, *norms]), step, True)
        self.engine.zero_grad()

    def do_drop(self, step: int) -> None:
        self.training.backward(self.loss(step))
        self.engine.zero_grad()

    def do_look(self, step: int) -> None:
        name = self.rng.choice([n for n, p in self.plain.masters.named_parameters() if p.numel()])
        self.engine.full_master(name)
        with zero.gathered(self.model.get_parameter(name)):
            got = self.model.get_parameter(name).detach().clone().float().cpu()
        expected = self.plain.model.get_parameter(name).detach().float()
        if self.drawn.optimizer != "lion":
            self.worse("state", float((got - expected).abs().max()), 0.0, float(expected.abs().max()))

    def do_two_forwards(self, step: int) -> None:
        """Of which one backward goes through both, with the batch of a later step as the second."""
        for _ in range(self.drawn.accumulation):
            value = self.loss(step) + 0.5 * self.loss(step + 7)
            self.training.backward(value)
            self.plain.backward_of(
                lambda rank: self.plain.loss(step, rank) + 0.5 * self.plain.loss(step + 7, rank)
            )
        self.plain.step()
        self.training.step()

    def do_thrown_away(self, step: int) -> None:
        self.loss(step)

    def do_part_alone(self, step: int) -> None:
        """A part called by itself, outside of the model's forward."""
        at = self.rng.randrange(len(self.drawn.recipe.kinds))
        x = torch.randn(2, 6, self.drawn.recipe.width, generator=torch.Generator().manual_seed(step))
        parts = [self.model.parts[at], self.plain.model.parts[at]]
        if not any(p.requires_grad for p in parts[1].parameters()):
            return

        def of(part: nn.Module, step: int) -> Tensor:
            weight = next(part.parameters())
            value = part(x.to(weight.device, weight.dtype), 1 + step % 2)
            return (value[0] if isinstance(value, tuple) else value).float().square().mean()

        for _ in range(self.drawn.accumulation):
            self.training.backward(of(parts[0], step))
            self.plain.backward_of(lambda rank: of(parts[1], step))
        self.plain.step()
        self.training.step()

    def do_trace(self, step: int) -> None:
        self.engine.trace_memory()

    def do_compare_gradient(self, step: int) -> None:
        """Of one micro-batch, which is dropped then."""
        for _ in range(self.drawn.accumulation):
            self.micro_batch(step, stepping=False)
        for name, parameter in self.plain.masters.named_parameters():
            got = self.engine.full_gradient(name)
            expected = self.plain.grads.get(parameter)
            assert (got is None) == (expected is None), f"gradient of {name}: {got is None}"
            if got is not None and expected is not None and expected.numel():
                scale = max(float(g.abs().max()) for g in self.plain.grads.values() if g.numel())
                self.worse("gradient", float((got.cpu() - expected).abs().max()), 0.0, scale)
        self.engine.zero_grad()
        self.plain.drop()


def play_body(context: Context, seeds: list[int], folder: str, compiled: bool = False) -> None:
    """Play the runs of these seeds; a failure tells what was drawn and done."""
    for seed in seeds:
        drawn = Drawn.draw(seed, compiled)
        play = Play(context, drawn, Path(folder) / str(seed))
        play.folder.mkdir(exist_ok=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                errors = play.run()
            assert max(errors.values()) < drawn.bound, errors
        except Exception as error:
            error.add_note("\n".join(map(str, play.told)))
            raise
