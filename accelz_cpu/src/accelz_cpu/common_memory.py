"""Flat buffers that the ranks of a node have in common, so that the node holds each weight once.

A buffer is an anonymous file in memory (memfd_create). The node's first rank creates it and tells the others
its process id and descriptor through the group's store; they open it under /proc. It has no name anywhere, so
nothing is left behind when ranks die, however they die, and no other user can open it. A forked child shares
it, like all memory of its parent, for as long as the child lives: it may read weights.

Each node has the whole buffer, and a gather brings the slices that ranks of other nodes own.
"""

from __future__ import annotations

import json
import mmap
import os
import weakref
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor

from accelz import FlatBuffer, Group, StorageSwap
from accelz.ranks import machine
from accelz.ranks.bounded_store import wait_for
from accelz.ranks.exchange import Exchange, unused_key
from accelz_cpu.hosts import Hosts, find_hosts


class CommonMemory(StorageSwap):
    """StorageSwap whose buffers can be shared by ranks that see each other's processes in /proc."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._apart: set[str] = set()  # names of groups known to have no memory in common
        self._groups: dict[int, str] = {}  # address of each common buffer -> name of its group
        self._meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, _Meeting] = weakref.WeakKeyDictionary()

    def has_in_place(self, whole: Tensor, shard: Tensor, group: Group) -> bool:
        """Whether `whole` is memory that all ranks of `group` see, and `shard` is this rank's slice of it."""
        shared = self._groups.get(whole.untyped_storage().data_ptr()) == group.process_group.group_name
        return shared and shard.data_ptr() == whole.data_ptr() + group.rank * shard.nbytes

    def share(self, buffer: FlatBuffer, group: Group) -> FlatBuffer | None:
        name = group.process_group.group_name
        if group.size == 1 or not buffer.nbytes or name in self._apart:
            return None
        meeting = self._meeting(group)
        memory = _map_together(buffer.data, meeting)
        if memory is None:
            self._apart.add(name)
            return None
        data = torch.frombuffer(memory, dtype=buffer.data.dtype)
        self._groups[data.data_ptr()] = name
        # The mapping ends with its last view: forget the address before another tensor can get it.
        weakref.finalize(memory, self._groups.pop, data.data_ptr()).atexit = False
        common = FlatBuffer(data, buffer.parameters, buffer.slots, common=True)
        common.bind()
        buffer.release()
        return common

    def _meeting(self, group: Group) -> _Meeting:
        """Return the place where the ranks of `group` meet for the next buffer."""
        meeting = self._meetings.get(group.process_group)
        if meeting is None:
            meeting = self._meetings[group.process_group] = _Meeting(group)
        meeting.turn += 1
        return meeting


class _Meeting:
    """Where the ranks of a group exchange a few words for each buffer, through the group's store.

    A word is deleted once all ranks have read it, so that the store does not grow with buffers and engines.
    Holds no reference to the group, so as to end with it. rank, size: this rank's place among the ranks of
    its node, and their number. turn: the number of the buffer.
    """

    def __init__(self, group: Group) -> None:
        self._exchange = Exchange(group, "accelz_cpu/common")
        self.hosts = find_hosts(group, self._exchange)
        self.rank = self.hosts.place
        self.size = len(self.hosts.here)
        self.turn = 0
        self._store = group.store.under(unused_key(group, "accelz_cpu/common memory"))
        self._timeout = group.timeout
        self._said: list[str] = []  # keys of this rank's words that are not deleted yet

    def tell(self, what: str, word: str) -> None:
        """Say a word to the ranks of this node."""
        key = self._key(what)
        self._said.append(key)
        self._store.set(key, word)

    def hear(self, what: str) -> str:
        """Wait for a word from this node's ranks; raises RuntimeError after the group's timeout."""
        key = self._key(what)
        return wait_for(self._store, [key], self._timeout)[0].decode()

    def exchange(self, word: str) -> list[str]:
        """Return every rank's word, by rank of the group. Ranks that call it have read all words before."""
        words = self._exchange(word)
        for key in self._said:
            self._store.delete_key(key)
        self._said.clear()
        return words

    def _key(self, what: str) -> str:
        return f"{self.turn}/{self.hosts.index}/{what}"


def _map_together(whole: Tensor, meeting: _Meeting) -> mmap.mmap | None:
    """Map memory that the ranks of each node have in common and fill it with `whole`, of which every element
    comes from one of them; or return None everywhere and warn."""
    if not meeting.hosts.even or meeting.size == 1:
        return None  # gathers would bypass the node's memory, or there is no rank to share it with
    with ExitStack() as until_all_have_it:
        if meeting.rank == 0:
            memory, problem = _offer(whole.nbytes, meeting, until_all_have_it)
        else:
            memory, problem = _accept(whole.nbytes, meeting)
        if memory is not None:
            common = torch.frombuffer(memory, dtype=whole.dtype)
            _slice(common, meeting.hosts).copy_(_slice(whole, meeting.hosts))
        problems = [p for p in meeting.exchange(problem) if p]
    if not problems:
        return memory
    if not all(p == APART for p in problems):
        machine.warn(
            f"each weight is held once per rank instead of once per node: {problems[0]}", stacklevel=2
        )
    return None


APART = "the ranks cannot see each other's processes"


def _offer(nbytes: int, meeting: _Meeting, stack: ExitStack) -> tuple[mmap.mmap | None, str]:
    """Create the memory, and leave to `stack` to close its descriptor, by which the others find it."""
    try:
        descriptor = os.memfd_create("accelz")
    except OSError as error:
        meeting.tell("offer", "null")
        return None, f"memory cannot be shared here ({error})"
    stack.callback(os.close, descriptor)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # a lack shows now, and not as a signal at a later write
        identity = os.fstat(descriptor)
        offer = [os.getpid(), descriptor, identity.st_dev, identity.st_ino]
        memory = mmap.mmap(descriptor, nbytes)
        meeting.tell("offer", json.dumps(offer))
        return memory, ""
    except OSError as error:
        meeting.tell("offer", "null")
        return None, f"{nbytes} bytes of shared memory cannot be allocated ({error})"


def _accept(nbytes: int, meeting: _Meeting) -> tuple[mmap.mmap | None, str]:
    offer = json.loads(meeting.hear("offer"))
    try:
        return (_open(offer, nbytes), "") if offer else (None, APART)
    except OSError:
        return None, APART


def _open(offer: list[int], nbytes: int) -> mmap.mmap:
    """Map the offered file; raises OSError if the process is not on this node, or another has its id."""
    process, number, device, inode = offer
    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
    try:
        identity = os.fstat(descriptor)
        if (identity.st_dev, identity.st_ino, identity.st_size) != (device, inode, nbytes):
            raise OSError("another process has this number")
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _slice(data: Tensor, hosts: Hosts) -> Tensor:
    """The part that this rank fills: every element is filled by exactly one rank of the node."""
    numel, place, size = data.numel(), hosts.place, len(hosts.here)
    return data[place * numel // size : (place + 1) * numel // size]
