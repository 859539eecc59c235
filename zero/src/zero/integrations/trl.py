"""What TRL's trainers need beside `zero.integrations.transformers.TrainerMixin`, which uses this by itself.

TRL is not imported here: it is there if one of its trainers is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import transformers
from torch import nn

from zero.whole.gathered import gathered

_TAUGHT = "_zero_gathers"  # an attribute of TRL's class


def teach_gathering() -> None:
    """Let `trl.distributed.DistributedBackend` gather engines' parameters, too, where TRL is in use.

    TRL gathers by it what it sends to vLLM, and around the merge of an adapter before that.
    """
    module = sys.modules.get("trl.distributed")
    if module is None or hasattr(module.DistributedBackend, _TAUGHT):
        return
    module.DistributedBackend.gather_params = _gathering(module.DistributedBackend.gather_params)
    setattr(module.DistributedBackend, _TAUGHT, True)


def _gathering(gather_params: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(gather_params)
    @contextmanager
    def both(self: Any, params: Iterable[nn.Parameter]) -> Iterator[None]:
        listed = list(params)
        with gathered(listed), gather_params(self, listed):
            yield

    return both


class Following(transformers.TrainerCallback):
    """TRL's SyncRefModelCallback, which reads and writes whole values. trainer: one with TrainerMixin."""

    def __init__(self, callback: Any, trainer: Any) -> None:
        self._callback = callback
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every rank writes the same values; those of rank 0 go to a sharded reference."""
        due = state.global_step % args.ref_model_sync_steps == 0
        reference = self._callback.ref_model
        with (
            gathered(self._trainer.model) if due else nullcontext(),
            gathered(reference, write_rank=0) if due and reference is not None else nullcontext(),
        ):
            self._callback.on_step_end(args, state, control, **kwargs)
