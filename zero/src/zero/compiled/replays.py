"""Graphs whose segments are captured as device graphs once their operands stay where they are, then replayed.

A replay does what calling the segment does, with the same bits, and costs the host one launch. It works on
the addresses that were captured, so it takes the call's place only where every operand lies where it did
then; in all other runs the segment is called. What comes to a graph at another address each time, such as a
batch, is copied to where it was captured.

The memory of a captured segment is the device graph's, and each replay writes it. So what a graph returns to
its caller is copied. What a forward saves for its backward is not: while any of that is alive, as between
several forwards and one backward, the graph's segments are called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols

from accelz import Accelerator, Graph
from zero.compiled.segments import Segment, cut, written_inputs
from zero.optimizer.captured_step import PATIENCE, STEADY
from zero.warning import warn

Run = Callable[[Sequence[Any]], Sequence[Any]]
MakeRun = Callable[[fx.GraphModule, Sequence[Any]], Run]
"""Compiles a segment for inputs like these (fake tensors, numbers)."""

_NOTED = "zero_ends"


@dataclass(frozen=True)
class Ends:
    """What a graph's ends are to its caller. moving: names of inputs that may lie elsewhere each time.
    results: how many of its outputs, the first ones, are the caller's to keep; None: all."""

    moving: frozenset[str]
    results: int | None = None

    def note(self, module: fx.GraphModule) -> None:
        """Note it on the graph, for whoever compiles it."""
        module.meta[_NOTED] = self


@dataclass(frozen=True)
class Count:
    """What has come of segments. captured: those with a device graph now, of `segments`. replayed, called:
    how often that was done. nbytes: that device graphs and copies of inputs keep, as the device counts them:
    torch's caching allocators count results, but not scratch memory, which waits in a graph's own pool.
    failed: why some segment could not be captured; or ""."""

    segments: int = 0
    captured: int = 0
    replayed: int = 0
    called: int = 0
    nbytes: int = 0
    failed: str = ""


class Replays:
    """The replayed graphs of one engine. failed: why a segment could not be captured; or ""."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.failed = ""
        self._runs = 0
        self._graphs: weakref.WeakSet[ReplayedGraph] = weakref.WeakSet()

    def make(self, module: fx.GraphModule, make: MakeRun) -> ReplayedGraph:
        """What runs a graph on whose module its `Ends` are noted. Called with a list, which it empties."""
        graph = ReplayedGraph(self, module, make)
        self._graphs.add(graph)
        return graph

    def drop(self) -> None:
        """Drop all device graphs, with their memory. Segments are captured anew later."""
        for graph in self._graphs:
            graph.drop()

    def count(self) -> Count:
        segments = [segment for graph in self._graphs for segment in graph.segments]
        return Count(
            len(segments),
            sum(segment.captured for segment in segments),
            sum(segment.replayed for segment in segments),
            sum(segment.called for segment in segments),
            sum(segment.nbytes for segment in segments) + sum(graph.copied for graph in self._graphs),
            self.failed,
        )

    def ran(self) -> None:
        """A graph has run. Warns if after many runs nothing was replayed."""
        self._runs += 1
        if self._runs == PATIENCE and not self.failed and not self.count().replayed:
            warn(_NEVER.format(PATIENCE), RuntimeWarning)

    def refuse(self, why: str) -> None:
        """A segment cannot be captured, and is called from now on. Warns of the first one."""
        if not self.failed:
            self.failed = why
            warn(_REFUSED + why, RuntimeWarning)


class ReplayedGraph:
    """Runs a graph, segment by segment. segments: in their order. replaying: whether they may be replayed in
    this run. copied: bytes of the inputs' copies."""

    def __init__(self, replays: Replays, module: fx.GraphModule, make: MakeRun) -> None:
        ends: Ends = module.meta[_NOTED]
        device = replays.accelerator.device.type
        placeholders = module.graph.find_nodes(op="placeholder")
        values = [node.meta.get("val") for node in placeholders]
        written = written_inputs(module.graph)
        self._replays = replays
        self._boxed_call = True  # called with a list of arguments, which is emptied
        self.replaying = False
        self._moving = [
            place
            for place, (node, value) in enumerate(zip(placeholders, values, strict=True))
            if node.name in ends.moving and node not in written
            if isinstance(value, Tensor) and value.device.type == device
        ]
        # What the shapes of everything inside follow from, where they are not fixed.
        self._numbers = [place for place, value in enumerate(values) if not isinstance(value, Tensor)]
        dynamic = [isinstance(value, Tensor) and bool(free_symbols(value)) for value in values]
        self._shaped = [place for place, is_dynamic in enumerate(dynamic) if is_dynamic]
        self._results = ends.results
        self.segments: list[ReplayedSegment] = []
        for segment in cut(module, device):
            self.segments.append(
                ReplayedSegment(self, replays, segment, make(segment.module, segment.inputs))
            )
            delattr(module, segment.name)
            setattr(module, segment.name, self.segments[-1])
        module.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
        module.recompile()
        _LazyGraphModule.force_recompile(module)
        self._run = module.forward
        self.drop()

    @property
    def copied(self) -> int:
        return sum(copy.nbytes for copy in self._copies.values())

    def drop(self) -> None:
        """Drop the device graphs, and what is theirs."""
        for segment in self.segments:
            segment.drop()
        self._shapes: Any = None
        self._other: Any = None  # shapes of the last call, if they were others
        self._others = 0  # calls in a row before it that had the same
        self._addresses: dict[int, int] = {}
        self._copies: dict[int, Tensor] = {}
        self._owned_copies: dict[int, Owned] = {}
        self._own: dict[int, Owned] = {}  # memory that runs write
        self._lent: dict[int, Owned] = {}  # what the caller was given of it

    def look_again(self) -> None:
        """Note what memory runs write from now on."""
        self._own = dict(self._owned_copies)
        for segment in self.segments:
            self._own |= segment.owned
        self._lent = {address: owned for address, owned in self._lent.items() if address in self._own}

    @torch.no_grad()
    def __call__(self, inputs: list[Any]) -> Any:
        self.replaying = not any(each.is_used for each in self._lent.values()) and self._settle(inputs)
        found = self._run(inputs)
        self._replays.ran()
        if not self._own:
            return found
        results = list(found)
        self._lent |= _given(results, self._own, len(results) if self._results is None else self._results)
        return results

    def _settle(self, inputs: list[Any]) -> bool:
        """Put inputs where segments find them; returns whether their shapes are those that are replayed."""
        tensors = [(place, inputs[place]) for place in self._moving]
        shapes = [inputs[place] for place in self._numbers]
        shapes += [inputs[place].shape for place in self._shaped]
        shapes += [(tensor.shape, tensor.stride()) for _, tensor in tensors]
        if shapes != self._shapes:
            self._others = self._others + 1 if shapes == self._other else 0
            self._other = shapes
            if self._shapes is not None and self._others < STEADY:
                return False
            self.drop()
            self._shapes = shapes
        for place, tensor in tensors:
            copy = self._copies.get(place)
            if copy is None:
                address = tensor.data_ptr()
                if self._addresses.setdefault(place, address) == address:
                    continue
                copy = _room_for(tensor)
                if copy is None:
                    continue
                self._copies[place] = copy
                self._owned_copies |= _owned([copy])
                self.look_again()
            inputs[place] = copy.copy_(tensor)
        return True


class ReplayedSegment:
    """Runs a segment: called, or replayed from a device graph. captured: whether there is one. nbytes: that
    it keeps. owned: the memory of its results, if that stays. stays: whether the last results lie in it."""

    def __init__(self, graph: ReplayedGraph, replays: Replays, segment: Segment, run: Run) -> None:
        self.replayed = self.called = 0
        self._graph = weakref.ref(graph)
        self._replays = replays
        self._run = run
        self._fed = [(place, graph.segments[number]) for place, number in segment.fed.items()]
        self._fed_places = frozenset(segment.fed)
        self._is_called = segment.called
        self._unread = segment.unread
        unbacked = free_unbacked_symbols([each for each in segment.inputs if each is not None])
        self._refused = segment.called or bool(unbacked)
        self.drop()

    @property
    def captured(self) -> bool:
        return self._device_graph is not None

    def drop(self) -> None:
        """Drop the device graph, with its memory."""
        self._forget()
        self.stays = False
        self._last: list[Any] | None = None
        self._steady = 0
        self._patience = STEADY

    def _forget(self) -> None:
        self.nbytes = 0
        self.owned: dict[int, Owned] = {}
        self._device_graph: Graph | None = None
        self._operands: list[Any] | None = None
        self._outputs: list[Any] = []

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        graph = self._graph()
        assert graph is not None
        if graph.replaying and not self._refused:
            operands = [i.data_ptr() if isinstance(i, Tensor) else i for i in inputs]
            if operands == self._operands:
                assert self._device_graph is not None
                self._device_graph.replay()
                self.replayed += 1
                self.stays = True
                return self._outputs
            if self._is_steady(operands) and self._capture(graph, inputs):
                self._operands = operands
                self.stays = True
                return self._outputs
        self.called += 1
        found = self._run(inputs)
        self.stays = graph.replaying and self._is_called
        return self._put(graph, found) if self.stays else found

    def _put(self, graph: ReplayedGraph, found: Sequence[Any]) -> Sequence[Any]:
        """Put results where those of the last call were."""
        if not self._outputs:
            self._outputs = [_room_for(each) if isinstance(each, Tensor) else each for each in found]
            self._own(graph)
            self.nbytes = sum(owned.nbytes for owned in self.owned.values())
        return [
            room.copy_(each) if isinstance(room, Tensor) and room.shape == each.shape else each
            for room, each in zip(self._outputs, found, strict=True)
        ]

    def _is_steady(self, operands: list[Any]) -> bool:
        """Whether operands have stayed where they are; those of segments may only just have come there."""
        own = [each for place, each in enumerate(operands) if place not in self._fed_places]
        self._steady = self._steady + 1 if own == self._last else 0
        self._last = own
        return self._steady >= self._patience and all(segment.stays for _, segment in self._fed)

    def _capture(self, graph: ReplayedGraph, inputs: Sequence[Any]) -> bool:
        """Capture a run and make it; returns whether that was possible."""
        device = self._replays.accelerator.device
        if any(_is_elsewhere(each, device) for place, each in enumerate(inputs) if place not in self._unread):
            return self._refuse(_ELSEWHERE)
        self._forget()  # its memory, before there is another's
        graph.look_again()
        self._patience *= 2  # operands that come and go are not worth many captures
        memory, streams = self._replays.accelerator.memory, self._replays.accelerator.streams
        before = memory.stats().allocated
        try:
            device_graph = streams.capture(lambda: self._outputs.extend(self._run(inputs)))
            device_graph.replay()
        except Exception as error:
            return self._refuse(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        if not _memory(self._outputs).keys().isdisjoint(_memory(inputs)):
            return self._refuse(_ALIAS)
        self._own(graph)
        self._device_graph, self.nbytes = device_graph, max(0, memory.stats().allocated - before)
        return True

    def _refuse(self, why: str) -> bool:
        self._outputs, self._refused = [], True
        self._replays.refuse(why)
        return False

    def _own(self, graph: ReplayedGraph) -> None:
        """Note the memory of the results, of which nothing else holds a tensor now."""
        self.owned = _owned(self._outputs)
        graph.look_again()


class Owned:
    """Memory that runs write. is_used: whether more tensors are in it than when this was made."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.nbytes = storage.nbytes()
        self._storage = storage
        self._count = torch._C._storage_Use_Count(storage._cdata)

    @property
    def is_used(self) -> bool:
        return torch._C._storage_Use_Count(self._storage._cdata) > self._count


def _owned(tensors: Sequence[Any]) -> dict[int, Owned]:
    return {address: Owned(storage) for address, storage in _memory(tensors).items()}


def _memory(values: Sequence[Any]) -> dict[int, torch.UntypedStorage]:
    """The memory that values lie in, by address; without what has no bytes."""
    storages = (value.untyped_storage() for value in values if isinstance(value, Tensor))
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _given(results: list[Any], own: dict[int, Owned], kept: int) -> dict[int, Owned]:
    """Replace results in memory that later runs write: the first `kept` by copies, the others by tensors of
    their own in that memory. Returns the memory of these."""
    lent: dict[int, Owned] = {}
    copies: dict[int, torch.UntypedStorage] = {}
    for place, tensor in enumerate(results):
        for address, storage in _memory([tensor]).items():
            if address not in own:
                continue
            if place >= kept:
                lent[address] = own[address]
            elif address not in copies:
                copies[address] = storage.clone()
            memory = storage if place >= kept else copies[address]
            there = tensor.storage_offset(), tensor.size(), tensor.stride()
            results[place] = tensor.new_empty(0).set_(memory, *there)
    return lent


def _is_elsewhere(value: Any, device: torch.device) -> bool:
    return isinstance(value, Tensor) and value.device.type != device.type


def _room_for(tensor: Tensor) -> Tensor | None:
    """Room for a copy with the same strides; None where elements lie on each other."""
    reached = 0  # elements, by the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride <= reached:
            return None
        reached += stride * max(size - 1, 0)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


_REFUSED = (
    "zero.Compile(graphs=True): a segment of a compiled graph could not be captured and is called each time: "
)
_ELSEWHERE = "it reads a tensor that is not on the device, of which replays would not see new values"
_ALIAS = "a result of it lies in the memory of what it was called with"
_NEVER = (
    "zero.Compile(graphs=True) has had no effect in {} runs of compiled graphs: shapes, or the addresses of "
    "gathered weights, are others each time. Leave it out, or see docs/captured-graphs.md"
)
