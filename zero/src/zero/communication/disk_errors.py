"""Errors of a rank's disk, kept until all ranks can raise them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from zero.errors import OffloadError


class PostponedDiskErrors:
    """The error of this rank's disk that the others do not know of yet.

    A rank whose disk fails continues to take part in the collectives of the others, with whatever values
    there are, and reports the error when the ranks agree the next time. alone: there are no others.

    As a context, it postpones an OffloadError of the block, unless that is the one all ranks have raised.
    """

    def __init__(self, alone: bool) -> None:
        self.own = ""
        self._alone = alone
        self._shared = ""  # the last one that was raised on all ranks

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, OffloadError) or self._alone or str(error) == self._shared:
            return False
        self.own = self.own or str(error)
        return True

    def share(self, every: Sequence[str]) -> NoReturn:
        """Raise OffloadError on all ranks. every: `own` by rank, not all empty."""
        self.own = ""
        self._shared = next(f"rank {rank}: {cause}" for rank, cause in enumerate(every) if cause)
        raise OffloadError(self._shared)
