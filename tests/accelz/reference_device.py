"""A device with nothing in its own module but what torch looks up there, as torch's reference device has it.

It is the simulated device's native half under another name: `torch_acme` loads it when it is imported, and
registers nothing. Memory, streams and events are reached by `torch.accelerator`, `torch.Stream` and
`torch.Event` alone.
"""

from __future__ import annotations

import shutil
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

LIBRARY = "torch_acme"

MODULE = """
import torch

from torch_acme import _C

_initialized = True
default_generators = tuple(map(_C.default_generator, range(_C.DEVICES)))
current_device = _C.current_device


class device:
    def __init__(self, index):
        self.index = _index(index)

    def __enter__(self):
        self.before = _C.exchange_device(self.index)

    def __exit__(self, *_):
        _C.exchange_device(self.before)


def _index(device=None):
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return _C.current_device() if index is None or index < 0 else index


def _is_in_bad_fork():
    return False


def is_available():
    return True


def is_initialized():
    return True


def device_count():
    return _C.DEVICES


def set_device(device):
    _C.exchange_device(_index(device))


def get_amp_supported_dtype():
    return [torch.bfloat16, torch.float16]


def manual_seed(seed):
    _C.default_generator(_C.current_device()).manual_seed(seed)


def manual_seed_all(seed):
    for generator in default_generators:
        generator.manual_seed(seed)


def get_rng_state(device="acme"):
    return _C.default_generator(_index(device)).get_state()


def set_rng_state(state, device="acme"):
    _C.default_generator(_index(device)).set_state(state)
"""


def install(folder: Path) -> None:
    """Put the library into `folder`; it is built with accelz-sim, so this takes no time."""
    native = find_spec("accelz_sim._C") if find_spec("accelz_sim") else None
    if native is None or native.origin is None:
        pytest.skip("accelz-sim is not installed: see examples/sim_backend/README.md")
    package = folder / LIBRARY
    package.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(native.origin, package / Path(native.origin).name)
    (package / "__init__.py").write_text(textwrap.dedent(MODULE))
