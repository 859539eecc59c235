"""Rows of a benchmark that are written as they come: one that is stopped leaves what it had measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.job import Job, JobError


class Rows:
    """to: the file, or None. settings: what the rows have in common."""

    def __init__(self, to: Path | None, **settings: Any) -> None:
        self._to = to
        self._settings = settings
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        """Print a row, and write it with those before it."""
        self.rows.append(row)
        print(
            json.dumps({key: value for key, value in row.items() if not isinstance(value, list)}), flush=True
        )
        if self._to is not None:
            written = {"settings": self._settings, "rows": self.rows}
            self._to.write_text(json.dumps(written, indent=1), encoding="utf-8")

    @contextmanager
    def attempt(self, **key: Any) -> Iterator[None]:
        """A job inside that fails becomes a row with its error's last line, and the others go on."""
        try:
            yield
        except JobError as error:
            self.add(**key, error=str(error).strip().rpartition("\n")[2])


def one_rank(service: type, *arguments: Any, limit: float) -> Job:
    """A process of its own, of a job with one rank; a call may take `limit` seconds."""
    return Job(service, arguments, 1, 1, limit)
