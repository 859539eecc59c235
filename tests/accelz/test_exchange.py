"""What the ranks of a group tell each other through its store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistStoreError, HashStore

from accelz.ranks.bounded_store import bounded
from accelz.ranks.exchange import Exchange, unused_key

RANKS = 3


def exchanges(store: Any, timeout: float = 10.0) -> list[Exchange]:
    """One for each rank."""
    named = SimpleNamespace(group_name="some")
    groups: list[Any] = [
        SimpleNamespace(
            rank=rank, size=RANKS, timeout=timeout, store=bounded(store, timeout), process_group=named
        )
        for rank in range(RANKS)
    ]
    return [Exchange(group, "test") for group in groups]


def together(ranks: list[Exchange], say: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda rank: ranks[rank](say(rank)), range(RANKS)))


def test_every_rank_gets_what_all_have_said_and_the_store_does_not_grow() -> None:
    store = HashStore()
    ranks, sizes = exchanges(store), []
    for turn in range(4):
        said = [[turn, rank] for rank in range(RANKS)]
        assert together(ranks, lambda rank: said[rank]) == [said] * RANKS  # noqa: B023
        sizes.append(store.num_keys())
    assert len(set(sizes)) == 1


def test_who_gave_up_waiting_has_said_nothing() -> None:
    """The next call of all ranks is one of its own."""
    ranks = exchanges(HashStore(), timeout=0.1)
    with pytest.raises(DistStoreError, match=r"timed out after 0\.1 s .*1/rank 1, 1/rank 2$"):
        ranks[0]("alone")
    with pytest.raises(DistStoreError, match=r"timed out after 0\.2 s .*1/rank 0, 1/rank 2$"):
        ranks[1]("later", timeout=0.2)
    for exchange in ranks:
        exchange._timeout = 10.0
    assert together(ranks, str) == [["0", "1", "2"]] * RANKS


def test_keys_of_one_purpose_are_never_used_twice() -> None:
    store = bounded(HashStore(), 10.0)
    group: Any = SimpleNamespace(rank=0, store=store, process_group=SimpleNamespace(group_name="some"))
    assert len({unused_key(group, "this") for _ in range(3)} | {unused_key(group, "that")}) == 4
