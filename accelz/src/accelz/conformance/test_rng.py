"""The RNG role: the device's default generator, seeded, saved and restored."""

from __future__ import annotations

import torch
from torch import Tensor

from accelz.accelerator import Accelerator
from accelz.conformance.contract import expect, expect_close
from accelz.conformance.fixtures import last_device
from accelz.conformance.marks import about

OWN = (
    "draw from the device's default generator in aten::normal_, uniform_, native_dropout and their like; "
    "where the host draws for the device, as a host fallback does, the role is accelz.HostRng()"
)


def saved_state(accelerator: Accelerator) -> Tensor:
    """Return the generator's state; raises ContractBroken unless it is fit for a checkpoint."""
    state = accelerator.rng.get_state()
    came = f"{state.dtype} on {state.device}"
    on_host = state.dtype == torch.uint8 and state.device.type == "cpu"
    expect(on_host, "Rng.get_state", "must be a uint8 tensor on the host", came)
    return state


class RngContract:
    def draw(self, accelerator: Accelerator) -> Tensor:
        """Draw numbers from the device's default generator, by randn and dropout."""
        values = torch.randn(1001, device=accelerator.device)
        return torch.dropout(values, 0.5, train=True).cpu()

    @about("Rng.seed")
    def test_a_seed_repeats_and_seeds_differ(self, accelerator: Accelerator) -> None:
        """Equal seeds give equal numbers, other seeds other numbers, and drawing moves on."""
        draws = []
        for seed in (7, 7, 8):
            accelerator.rng.seed(seed)
            draws.append(self.draw(accelerator))
        expect_close(draws[1], draws[0], "Rng.seed", "the same seed must give the same numbers", do=OWN)
        expect(not torch.equal(draws[2], draws[0]), "Rng.seed", "another seed must give other numbers")
        expect(not torch.equal(self.draw(accelerator), draws[2]), "Rng.seed", "must not seed every draw")

    @about("Rng.seed")
    def test_every_bit_of_a_seed_counts(self, accelerator: Accelerator) -> None:
        """Seeds that differ in one of the lower 32 bits give different numbers."""
        seeds = [5, *(5 ^ 1 << bit for bit in (1, 7, 8, 15, 16, 24, 31))]
        seen: dict[tuple[float, ...], int] = {}
        for seed in seeds:
            accelerator.rng.seed(seed)
            values = tuple(self.draw(accelerator)[:16].tolist())
            came = f"{seed} gives the numbers of {seen.get(values)}"
            expect(values not in seen, "Rng.seed", "seeds below 2**32 must give numbers of their own", came)
            seen[values] = seed

    @about("Rng.get_state", "Rng.set_state")
    def test_a_state_comes_back(self, accelerator: Accelerator) -> None:
        """A saved state, restored, gives the same numbers again, whatever happened in between."""
        accelerator.rng.seed(3)
        self.draw(accelerator)
        state = saved_state(accelerator)
        first = self.draw(accelerator)
        accelerator.rng.seed(4)
        accelerator.rng.set_state(state)
        again = self.draw(accelerator)
        expected = "the numbers after it must be those after get_state()"
        expect_close(again, first, "Rng.set_state", expected, do=OWN)

    @about("Rng.get_state")
    def test_a_state_is_a_snapshot(self, accelerator: Accelerator) -> None:
        """A state is a uint8 host tensor that later draws do not change, fit to go into a checkpoint."""
        state = saved_state(accelerator)
        kept = state.clone()
        self.draw(accelerator)
        expect_close(state, kept, "Rng.get_state", "must not change with later draws", do="return a copy")
        accelerator.rng.set_state(kept)
        expected = "get_state() must return what was set"
        expect_close(accelerator.rng.get_state(), kept, "Rng.set_state", expected)

    @about("Rng.seed", "Rng.get_state", "Rng.set_state")
    def test_the_generator_is_that_of_the_bound_device(self, accelerator: Accelerator) -> None:
        """After bind() to another device, seeds and states are those of its generator."""
        with last_device(accelerator):
            self.test_a_seed_repeats_and_seeds_differ(accelerator)
            self.test_a_state_comes_back(accelerator)


class TestRng(RngContract):
    pass
