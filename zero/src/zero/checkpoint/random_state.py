"""States of this rank's random number generators: torch's on the host, the device's, Python's, numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from accelz.accelerator import Accelerator
from accelz.flat_buffer import HOST


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


def restore(accelerator: Accelerator, states: dict[str, Any]) -> None:
    """Restore the generators, except the device's if the saved state is of another kind (another length)."""
    torch.set_rng_state(states["torch"])
    if states["device"].shape == accelerator.rng.get_state().shape:
        accelerator.rng.set_state(states["device"])
    python, numpy = states["python"], states["numpy"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
