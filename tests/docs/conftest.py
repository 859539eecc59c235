"""Tests of the documentation's site: `make docs` builds it and runs them, where mkdocs is."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("mkdocs") is None:  # the environment of `make test`
    collect_ignore_glob = ["test_*.py"]
