"""Messages: whatever names are in them, a terminal shows them and obeys nothing."""

from __future__ import annotations

import pickle

import pytest

import zero
from zero.errors import StateError, printable, some

ODD = "a\x1b]0;title\x07\n\u202e\ud800é"
SHOWN = r"a\x1b]0;title\x07\n\u202e\ud800é"


def test_what_a_terminal_obeys_is_escaped() -> None:
    assert printable(ODD) == SHOWN
    assert printable("plain text, 漢字 → ∞") == "plain text, 漢字 → ∞"
    assert some([ODD, "b"]) == f"{SHOWN}, b"


@pytest.mark.parametrize("kind", [zero.CheckpointError, zero.CorruptCheckpointError, StateError])
def test_messages_about_files_are_one_line(kind: type[Exception]) -> None:
    error = kind(ODD)
    assert str(error) == SHOWN
    assert str(pickle.loads(pickle.dumps(error))) == SHOWN


def test_other_messages_may_have_lines() -> None:
    assert str(zero.UsageError(f"first\n{ODD}")) == "first\n" + SHOWN.replace(r"\n", "\n")
