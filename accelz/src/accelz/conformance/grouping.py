"""Failures by their reason: one text for all tests that fail for the same one, however many they are."""

from __future__ import annotations

import re
from typing import Any

VARYING = re.compile(r"\([^()]*\)|torch\.\w+|\d[\d.,]*")
"""The parts of a sentence in which failures for one reason differ: cases, dtypes and numbers."""
SHOWN = 3
VALUES_SHOWN = 4


def alike(sentence: str) -> str:
    """Return `sentence` without what varies from case to case."""
    while (shorter := VARYING.sub("#", sentence)) != sentence:
        sentence = shorter
    return sentence


def texts(failures: list[dict[str, Any]]) -> list[str]:
    """Return one text per reason: the first failure's message, and the tests that failed for that reason."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for failure in failures:
        groups.setdefault((failure["broken"], alike(_sentence(failure))), []).append(failure)
    return [f"{members[0]['message']}\n  in:   {_tests(members)}\n" for members in groups.values()]


def name(failure: dict[str, Any]) -> str:
    """The name of a failure's test, as -k takes it."""
    test: str = failure["test"].rpartition("::")[2]
    return test.partition("[")[0]


def _sentence(failure: dict[str, Any]) -> str:
    """What the contract asks, or for any other error its first line."""
    lines = failure["message"].splitlines()
    if not failure["message"].startswith(f"{failure['broken']}: "):
        lines = [line for line in lines if line.startswith("E ")] or lines
    return lines[0] if lines else ""


def _tests(failures: list[dict[str, Any]]) -> str:
    cases: dict[str, list[dict[str, Any]]] = {}
    for failure in failures:
        cases.setdefault(name(failure), []).append(failure)
    shown = [f"{test}{_cases(members)}" for test, members in list(cases.items())[:SHOWN]]
    more = f" and {len(cases) - SHOWN} more" if len(cases) > SHOWN else ""
    return f"{', '.join(shown)}{more}"


def _cases(failures: list[dict[str, Any]]) -> str:
    """Say in which cases a test failed, if there are several: " (30 cases: dtype float32, float16)"."""
    if len(failures) == 1:
        return ""
    values: dict[str, list[str]] = {}
    for failure in failures:
        for parameter, value in failure["parameters"].items():
            seen = values.setdefault(parameter, [])
            seen.extend([value] if value not in seen else [])
    said = [f"{parameter} {_some(seen)}" for parameter, seen in values.items()]
    return f" ({len(failures)} cases{': ' if said else ''}{'; '.join(said)})"


def _some(values: list[str]) -> str:
    return f"{', '.join(values[:VALUES_SHOWN])}{', …' if len(values) > VALUES_SHOWN else ''}"
