"""What the ranks of a group tell each other through its store, which works even while collectives hang."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from typing import Any

from accelz.ranks.bounded_store import wait_for
from accelz.ranks.group import Group
from accelz.ranks.peers import Peers


def unused_key(group: Group, purpose: str) -> str:
    """Return a prefix in the group's store that nothing has used yet, whether for another object of this
    process or in an earlier job. Every rank must call this, equally often and in the same order.
    """
    name = f"{purpose}/{group.process_group.group_name}"
    turn = group.store.add(f"{name}/asked by {group.rank}", 1)
    return f"{name}/{turn}"


class Exchange:
    """Where the ranks of a group say one value each, again and again.

    purpose: as in `unused_key`, whose rule holds for making one. A value is deleted once every rank has read
    it, so that the store does not grow, and when its rank gives up waiting: whoever comes later then waits
    for a new one instead of taking it for an answer. peers: the ranks' processes, not to wait for those that
    have ended.
    """

    def __init__(self, group: Group, purpose: str, peers: Peers | None = None) -> None:
        self._store = group.store.under(unused_key(group, purpose))
        self._rank, self._ranks = group.rank, range(group.size)
        self._timeout = group.timeout
        self.peers = peers or Peers()
        self._turn = 1

    def __call__(self, value: Any, timeout: float | None = None) -> list[Any]:
        """Return every rank's JSON value, by rank, once all have made the same call.

        Raises MissingKeysError after `timeout` seconds (by default the group's), or once a rank is known to
        have ended, and HostSilentError. A call that raises does not count.
        """
        keys = [f"{self._turn}/rank {rank}" for rank in self._ranks]
        ended = partial(self.peers.ended, self._store, dict(enumerate(keys)))
        self._store.set(keys[self._rank], json.dumps(value))
        try:
            said = wait_for(self._store, keys, self._timeout if timeout is None else timeout, give_up=ended)
        except BaseException:
            with suppress(RuntimeError):  # the store's host is gone or silent
                self._store.delete_key(keys[self._rank])
            raise
        self._store.delete_key(f"{self._turn - 1}/rank {self._rank}")  # all ranks have read it
        self._turn += 1
        return [json.loads(value) for value in said]
