"""Waiting for keys of a store."""

from __future__ import annotations

import itertools

import pytest
from torch.distributed import DistStoreError, HashStore

from accelz.polled_store import wait_for


def test_a_wait_may_be_given_up_and_names_the_keys_that_are_missing() -> None:
    store = HashStore()
    store.set("there", "")
    asked = itertools.count()
    with pytest.raises(DistStoreError, match=r"gave up after 0\.\d s: tired, .*not set: missing$"):
        wait_for(store, ["there", "missing"], 10, give_up=lambda: "tired" * (next(asked) == 3))
    assert next(asked) == 4


def test_what_is_there_is_not_given_up() -> None:
    store = HashStore()
    store.set("there", "")
    wait_for(store, ["there"], 10, give_up=lambda: "tired")
