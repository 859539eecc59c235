"""Settings that are given as a mapping or as a file of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero.config.paths import as_path
from zero.errors import ConfigError


def read_settings(
    source: Mapping[str, Any] | str | Path, what: str = "a DeepSpeed configuration"
) -> Mapping[str, Any]:
    """Return settings, which are given as they are or as a file. what: to call them. Raises ConfigError for
    anything else."""
    if isinstance(source, Mapping):
        return source
    try:
        given = json.loads(as_path(source).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not {what}: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{source} is not {what}: expected a JSON object")
    return given
