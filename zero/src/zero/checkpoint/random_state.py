"""States of this rank's random number generators: torch's on the host, the device's, Python's, numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from accelz import HOST, Accelerator
from zero.errors import StateError


def read(accelerator: Accelerator) -> dict[str, Any]:
    """All states, as values that user_state.encode takes."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "device": accelerator.rng.get_state(),
        "python": {"version": version, "internal": torch.tensor(internal, device=HOST), "gauss": gauss},
        "numpy": {
            "kind": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }


def check(states: dict[str, Any]) -> None:
    """Raise StateError if the host's generators cannot take the states. Changes nothing."""
    try:
        torch.Generator(device=HOST).set_state(states["torch"])
        random.Random().setstate(_python(states))
        np.random.RandomState().set_state(_numpy(states))
    except Exception as error:
        raise StateError(
            f"the checkpoint's random state cannot be restored ({error}); weights_only=True leaves it out"
        ) from error


def restore(accelerator: Accelerator, states: dict[str, Any]) -> None:
    """Restore the generators, except the device's if the saved state is of another kind (another length)."""
    torch.set_rng_state(states["torch"])
    now, saved = accelerator.rng.get_state(), states["device"]
    if (saved.shape, saved.dtype) == (now.shape, now.dtype):
        accelerator.rng.set_state(saved)
    random.setstate(_python(states))
    np.random.set_state(_numpy(states))


def _python(states: dict[str, Any]) -> tuple[int, tuple[int, ...], float | None]:
    state = states["python"]
    return state["version"], tuple(state["internal"].tolist()), state["gauss"]


def _numpy(states: dict[str, Any]) -> tuple[str, Any, int, int, float]:
    state = states["numpy"]
    keys = state["keys"].numpy().astype(np.uint32)
    return state["kind"], keys, state["position"], state["has_gauss"], state["cached"]
