"""Objects of an engine refuse deepcopy, pickle and `torch.save`, and so does the model that holds them."""

from __future__ import annotations

from typing import Any

from zero.errors import UsageError


class Uncopied:
    """Base of objects that are reachable from a model that has an engine, through its hooks or parameters."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a model that has an engine cannot be copied or pickled: copy it before zero.initialize; "
            "engine.state_dict() has its values for torch.save, and engine.save_checkpoint saves the whole "
            "training state"
        )
