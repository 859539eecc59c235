"""What the user's optimizer object holds: pieces in place of parameters, and as their state views of the
sub-groups' records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.gradients.group_gradients import GroupGradients
from zero.optimizer.joint import members
from zero.optimizer.kernel_rules import Rule
from zero.optimizer.owned import OwnedPiece, OwnedSubGroup
from zero.optimizer.piece_state import kept_tensors, moved
from zero.optimizer.pieces import shaped, show, sliced
from zero.tiers.stored import Stored


class InstalledPieces:
    """The pieces of `subs` in the optimizer's param_groups, from `install` on."""

    def __init__(self, optimizer: Optimizer, subs: Sequence[OwnedSubGroup]) -> None:
        self._optimizer = optimizer
        self._subs = subs
        self._versions: dict[OwnedSubGroup, list[int]] = {}
        self._lengths: list[int] = []

    def install(self) -> None:
        """Put the pieces into param_groups, in place of the parameters that they are parts of."""
        lists: list[list[nn.Parameter]] = [[] for _ in self._optimizer.param_groups]
        initial = dict(self._optimizer.state)  # some optimizers have state before their first step
        self._optimizer.state.clear()
        for owned in self._subs:
            for piece in owned.pieces:
                lists[piece.param_group].append(piece.parameter)
                original = owned.group.parameters[piece.piece.index]
                if original in initial:
                    self._optimizer.state[piece.parameter] = sliced(initial[original], owned, piece.piece)
        for group, parameters in zip(self._optimizer.param_groups, lists, strict=True):
            group["params"] = parameters
        self._lengths = self._group_lengths()
        self.snapshot()

    @property
    def complete(self) -> bool:
        """Whether param_groups have the parameters that `install` gave them."""
        return self._group_lengths() == self._lengths

    def _group_lengths(self) -> list[int]:
        each = (group for optimizer in members(self._optimizer) for group in optimizer.param_groups)
        return [len(group["params"]) for group in each]

    def first_of(self, gradients: Iterable[tuple[OwnedSubGroup, GroupGradients]]) -> Iterable[nn.Parameter]:
        """One piece in each param_group, of a parameter that has a gradient."""
        found: dict[int, nn.Parameter] = {}
        for owned, have in gradients:
            for piece in owned.pieces:
                if piece.param_group not in found and piece.piece.index in have.used:
                    found[piece.param_group] = piece.parameter
        return found.values()

    def snapshot(self, stepped: Iterable[OwnedSubGroup] | None = None) -> None:
        """Note that weights and masters have the same values now, of these sub-groups or of all: `changed`
        tells what is written from here on."""
        subs = self._subs if stepped is None else stepped
        self._versions |= {owned: owned.piece_versions() for owned in subs}

    def changed(self) -> dict[OwnedSubGroup, list[str]]:
        """Sub-groups with pieces that were written to since `snapshot()`, each with the names of those
        pieces."""
        return {
            owned: [owned.name_of(p) for p, a, b in zip(owned.pieces, before, now, strict=True) if a != b]
            for owned, before in self._versions.items()
            if (now := owned.piece_versions()) != before
        }

    def show(self, owned: OwnedSubGroup) -> None:
        """Make the pieces and their state views of the record that the sub-group has now."""
        was_changed = self._versions[owned] != owned.piece_versions()
        for piece in owned.pieces:
            show(owned, piece)
        if owned.rule is not None:
            self.show_state(owned, owned.rule)
        versions = owned.piece_versions()  # these differ where a piece comes from another kind of memory
        self._versions[owned] = [version - was_changed for version in versions]

    def show_state(self, owned: OwnedSubGroup, rule: Rule) -> None:
        """Make the state of the pieces views of the record and the count. rule: of the kernel."""
        for index, piece in enumerate(owned.pieces):
            state = _views(owned, index, rule)
            self._optimizer.state.setdefault(piece.parameter, {}).update(state)

    def own_state_on(self, owned: OwnedSubGroup, device: torch.device) -> list[tuple[OwnedPiece, Any]]:
        """What the optimizer itself keeps of the sub-group's pieces, copied to `device` where that is another
        memory; for `take_own_state`."""
        pieces = owned.pieces if owned.rule is None else ()
        states = ((piece, self._optimizer.state.get(piece.parameter, {})) for piece in pieces)
        return [
            (piece, {key: moved(key, value, piece.parameter, device) for key, value in state.items()})
            for piece, state in states
            if state
        ]

    def take_own_state(self, states: Iterable[tuple[OwnedPiece, Any]]) -> None:
        for piece, state in states:
            self._optimizer.state[piece.parameter].update(state)

    def own_state(self, subs: Iterable[OwnedSubGroup]) -> Iterator[Tensor]:
        """What the optimizer itself keeps beside the pieces of these sub-groups."""
        for owned in subs:
            for piece in owned.pieces if owned.rule is None else ():
                yield from kept_tensors(self._optimizer.state.get(piece.parameter, {}), piece.parameter)


def _views(owned: OwnedSubGroup, index: int, rule: Rule) -> dict[str, Any]:
    """A piece's part of the flat state; for moments on disk, their places there."""
    piece = owned.pieces[index].piece
    state: dict[str, Any] = {"step": owned.counted.steps[index]} if rule.counts else {}
    for name, moment in zip(rule.moments, owned.sub.kept.moments, strict=True):
        state[name] = (
            moment[piece.shard_slice] if isinstance(moment, Stored) else shaped(moment, owned.group, piece)
        )
    return state
