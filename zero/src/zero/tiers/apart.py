"""The engine's own work, apart from what the program has switched on around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes

_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_HERE = nullcontext()


def apart() -> AbstractContextManager[None]:
    """Wrap work on the engine's own tensors, none of which the program gives or gets.

    In the block, transforms of torch.func do not wrap what is made, dispatch modes do not see it (selective
    checkpointing would keep it, and hand it out in the recomputation), and function modes do not change it
    (a default device would move it). Costs less than a microsecond where nothing is switched on.
    """
    if _modes() or _function_modes() or _transform() is not None:
        return _apart()
    return _HERE


@contextmanager
def _apart() -> Iterator[None]:
    with ExitStack() as stack:
        if _transform() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        if _modes():
            stack.enter_context(_disable_current_modes())
        if _function_modes():
            stack.enter_context(torch._C.DisableTorchFunction())
        yield
