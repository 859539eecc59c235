# ruff: noqa: E402, I001 (the order of these imports is the point)
"""A contract double of Habana's bridge 1.19 over the simulated device: settings are read at import, once.

The environment says what the real one finds out: DOUBLE_TORCH_FORK=1 (torch is the vendor's fork),
DOUBLE_MODULES (module identifiers in the server), DOUBLE_HELD (a folder of locks, one per module).
"""

import os
from pathlib import Path

import habana_frameworks.autoload

habana_frameworks.autoload.is_loaded = True

import torch

from habana_frameworks.torch.utils.internal import is_lazy

compiled_for = Path(__file__).with_name("required_version.txt").read_text().split(".")[:2]
assert torch.__version__.split(".")[:2] == compiled_for, (
    f"Error: Compile-time major/minor PyTorch version {compiled_for} differs from {torch.__version__}."
)
if is_lazy():
    fork = os.environ.get("DOUBLE_TORCH_FORK") == "1"
    assert fork, f"Stock PyTorch version {torch.__version__} is not supported in Lazy mode."

import habana_frameworks.torch.core
import habana_frameworks.torch.distributed.hccl
import habana_frameworks.torch.hpu
