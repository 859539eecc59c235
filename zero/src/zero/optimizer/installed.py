"""What the user's optimizer object holds: pieces in place of parameters, and as their state views of the
sub-groups' records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelz import HOST
from zero.errors import UsageError
from zero.optimizer.joint import members, parameters_of
from zero.optimizer.kernel_rules import Rule
from zero.optimizer.piece_state import moved, tensors_beside
from zero.optimizer.pieces import shaped, show, sliced, state_here
from zero.optimizer.shown_state import REPLACED, ShownPiece, ShownState
from zero.optimizer.stepped import SteppedPiece, SteppedSubGroup
from zero.sharding.flat_group import FlatGroup
from zero.tiers.coded import Coded
from zero.tiers.tier import Record
from zero.tiers.values import Stored, Values

PieceStates = list[tuple[SteppedPiece, dict[str, Any]]]


class InstalledPieces:
    """The pieces of sub-groups in the optimizer's param_groups, from `install` on.

    moved: what to call, if it is alive, when pieces have got other memory: torch takes their `grad` away.
    """

    def __init__(self, optimizer: Optimizer, subs_of: Mapping[FlatGroup, Sequence[SteppedSubGroup]]) -> None:
        self._optimizer = optimizer
        self._subs_of = subs_of
        self._subs = [stepped for subs in subs_of.values() for stepped in subs]
        self._versions: dict[SteppedSubGroup, list[int]] = {}
        self._lengths: list[int] = []
        self._shared: ShownState | None = None
        self.moved: Callable[[], Callable[[], None] | None] = lambda: None

    def install(self) -> None:
        """Put the pieces into param_groups, in place of the parameters that they are parts of."""
        lists: list[list[nn.Parameter]] = [[] for _ in self._optimizer.param_groups]
        initial = dict(self._optimizer.state)  # some optimizers have state before their first step
        initial = {parameter: state_here(state, parameter) for parameter, state in initial.items()}
        if len(self._all()) > 1 or any(stepped.rule is not None for stepped in self._subs):
            self._shared = ShownState(piece.parameter for stepped in self._subs for piece in stepped.pieces)
            for optimizer in self._all():
                optimizer.state = self._shared
        else:
            self._optimizer.state.clear()  # it may be that of an optimizer which this one wraps
        for stepped in self._subs:
            for piece in stepped.pieces:
                lists[piece.param_group].append(piece.parameter)
                original = stepped.group.parameters[piece.piece.index]
                if original in initial:
                    self._optimizer.state[piece.parameter] = sliced(initial[original], stepped, piece.piece)
        for group, parameters in zip(self._optimizer.param_groups, lists, strict=True):
            group["params"] = parameters
        for optimizer in members(self._optimizer):  # a rank may have no part of what it steps
            if not any(group["params"] for group in optimizer.param_groups):
                optimizer.param_groups[0]["params"].append(nn.Parameter(torch.empty(0, device=HOST)))
        self._lengths = self._group_lengths()
        self.snapshot()

    def _all(self) -> set[Optimizer]:
        return {self._optimizer, *members(self._optimizer)}

    def check_state(self) -> None:
        """Raise UsageError if optimizers no longer keep their state where others, or the engine, do too."""
        if self._shared is not None and any(each.state is not self._shared for each in self._all()):
            raise UsageError(REPLACED)

    @property
    def complete(self) -> bool:
        """Whether param_groups have the parameters that `install` gave them."""
        return self._group_lengths() == self._lengths

    def _group_lengths(self) -> list[int]:
        each = (group for optimizer in members(self._optimizer) for group in optimizer.param_groups)
        return [len(group["params"]) for group in each]

    def first_of(self, optimizer: Optimizer) -> nn.Parameter:
        """One of the parameters that one of the user's optimizers has."""
        return parameters_of(optimizer)[0]

    def snapshot(self, stepped: Iterable[SteppedSubGroup] | None = None) -> None:
        """Note that weights and masters have the same values now, of these sub-groups or of all: `changed`
        tells what is written from here on."""
        subs = self._subs if stepped is None else stepped
        self._versions |= {stepped: stepped.piece_versions() for stepped in subs}

    def changed(self) -> dict[SteppedSubGroup, list[str]]:
        """Sub-groups with pieces that were written to since `snapshot()`, each with the names of those
        pieces."""
        return {
            stepped: [stepped.name_of(p) for p, a, b in zip(stepped.pieces, old, now, strict=True) if a != b]
            for stepped, old in self._versions.items()
            if (now := stepped.piece_versions()) != old
        }

    def show(self, stepped: SteppedSubGroup) -> None:
        """Make the pieces and their state views of the record that the sub-group has now."""
        was_changed = self._versions[stepped] != stepped.piece_versions()
        for piece in stepped.pieces:
            show(stepped, piece)
        if stepped.rule is not None:
            self.show_state(stepped, stepped.rule)
        versions = stepped.piece_versions()  # these differ where a piece comes from another kind of memory
        self._versions[stepped] = [version - was_changed for version in versions]
        if (tell := self.moved()) is not None:
            tell()

    def show_state(self, stepped: SteppedSubGroup, rule: Rule) -> None:
        """Make the state of the pieces views of the record and the count. rule: of the kernel."""
        assert self._shared is not None
        for index, piece in enumerate(stepped.pieces):
            state = _views(stepped, index, rule)
            self._shared.setdefault(piece.parameter, ShownPiece()).update(state)

    def state_beside_on(self, stepped: SteppedSubGroup, device: torch.device) -> PieceStates:
        """What the optimizer itself keeps of the sub-group's pieces, copied to `device` where that is another
        memory; for `take_state_beside`."""
        pieces = stepped.pieces if stepped.rule is None else ()
        states = ((piece, self._optimizer.state.get(piece.parameter, {})) for piece in pieces)
        return [
            (piece, {key: moved(key, value, piece.parameter, device) for key, value in state.items()})
            for piece, state in states
            if state
        ]

    def take_state_beside(self, states: PieceStates) -> None:
        for piece, state in states:
            self._optimizer.state[piece.parameter].update(state)

    def state_beside(self, subs: Iterable[SteppedSubGroup]) -> Iterator[Tensor]:
        """What the optimizer itself keeps beside the pieces of these sub-groups."""
        for stepped in subs:
            for piece in stepped.pieces if stepped.rule is None else ():
                yield from tensors_beside(self._optimizer.state.get(piece.parameter, {}), piece.parameter)


def _views(stepped: SteppedSubGroup, index: int, rule: Rule) -> dict[str, Any]:
    """A piece's part of the flat state; for moments on disk, their places there, and for those in 8 bits what
    reads and writes them."""
    piece = stepped.pieces[index].piece
    state: dict[str, Any] = {"step": stepped.steps[index]} if rule.counts else {}
    for name, moment in zip(rule.moments, _moments(stepped.record, rule), strict=True):
        state[name] = (
            moment[piece.shard_slice] if isinstance(moment, Stored) else shaped(moment, stepped.specs, piece)
        )
    return state


def _moments(record: Record, rule: Rule) -> Sequence[Values]:
    """The moments of a record, (numel,) each."""
    if not rule.coded:
        return record.moments
    count = len(rule.moments)
    codes, scales = record.moments[:count], record.moments[count:]
    return [Coded(*each) for each in zip(codes, scales, rule.update.maps(), strict=True)]
