"""The trainable sub-groups as an optimizer sees them: this rank's pieces, and how often each was stepped."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from accelz import Group
from zero.gradients.reduced_slice import ReducedSlice
from zero.optimizer.kernel_rules import Rule
from zero.optimizer.routes import Routes
from zero.sharding.alterations import versions_of
from zero.sharding.flat_group import FlatGroup
from zero.sharding.layout import ParameterSpec, Piece
from zero.sharding.sub_group import SubGroup
from zero.tiers.tier import Record


@dataclass(frozen=True)
class StepGradients:
    """The gradients that a group is stepped with: those of the parameters `used`, by index, in `slice`."""

    group: FlatGroup
    used: set[int]
    slice: ReducedSlice


_parameter = attrgetter("parameter")


@dataclass
class SteppedPiece:
    """What the optimizer has in place of a parameter.

    piece: which part of the parameter it is, and where that lies: in the sub-group or, where whole parameters
    are stepped, among those of this rank. parameter: the tensor in param_groups. history: a number that
    pieces have in common if they have the same step count.
    """

    piece: Piece
    param_group: int
    parameter: nn.Parameter
    history: int = 0


@dataclass(eq=False)
class SteppedSubGroup:
    """A sub-group of `group` with this rank's pieces.

    rule: of the kernel that steps it; None where the user's optimizer does. routes: where pieces are whole
    parameters, put together for a step; the sub-group is then the whole shard. ranks: that these go
    between. turns: steps that it took part in. steps: only where a kernel serves, (pieces,) fp32, each
    piece's own number of steps; beside the record or, if that is on disk, on the host.
    """

    group: FlatGroup
    sub: SubGroup
    rule: Rule | None
    routes: Routes | None
    ranks: Group
    pieces: list[SteppedPiece] = field(default_factory=list)
    turns: int = 0
    steps: Tensor = field(init=False)
    _runs: tuple[tuple[int, ...], list[tuple[int, slice]]] | None = field(default=None, init=False)
    _counted: int | None = field(default=None, init=False)  # version of `steps` after the last step

    @property
    def numel(self) -> int:
        """Elements that this rank steps."""
        return self.sub.numel if self.routes is None else self.routes.numel

    @property
    def specs(self) -> tuple[ParameterSpec, ...]:
        """The group's parameters as they are stepped."""
        return self.group.layout.specs if self.routes is None else self.routes.specs

    @property
    def joins_blocks(self) -> bool:
        """Whether blocks of the parameters are put together for a step."""
        return self.routes is not None and self.routes.joins_blocks

    @property
    def record(self) -> Record:
        return self.sub.record

    @property
    def master(self) -> Tensor:
        """The master of a record in memory that the user's optimizer steps; the state of the pieces is on
        the same device."""
        return self.record.opened().master

    def name_of(self, piece: SteppedPiece) -> str:
        return self.group.names[piece.piece.index]

    def versions(self) -> list[int]:
        """The number of in-place changes of what a step reads besides the gradient: of a record in memory,
        and of the optimizer's views of it."""
        state = self.record.opened()
        views = [piece.parameter for piece in self.pieces]
        return [v._version for v in (state.master, *state.moments, self.steps, *views)]

    def piece_versions(self) -> list[int]:
        """How often each piece was written to directly, as optimizers and programs do; kernels do not."""
        return versions_of(map(_parameter, self.pieces))

    def missing(self, used: set[int]) -> tuple[int, ...]:
        """Indices of the pieces whose parameters are not among `used`."""
        if used >= self._indices:
            return ()
        return tuple(i for i, p in enumerate(self.pieces) if p.piece.index not in used)

    @cached_property
    def _indices(self) -> frozenset[int]:
        return frozenset(piece.piece.index for piece in self.pieces)

    def remember(self, missed: tuple[int, ...]) -> None:
        """Note a step, counted in `steps`, in which the `missed` pieces had no gradient: their counts are
        behind from now on."""
        self._counted = self.steps._version
        self.turns += 1
        for piece in [self.pieces[index] for index in missed]:
            self._set_history(piece, (piece.history, self.turns))

    def take_steps(self, piece: SteppedPiece, steps: float) -> None:
        """Note that a piece has the step count of a checkpoint: with all of the same count it can share a
        kernel call."""
        self._set_history(piece, ("loaded", steps))

    def _set_history(self, piece: SteppedPiece, what: tuple[Any, ...]) -> None:
        piece.history = hash(what)
        self._runs = None

    def runs(self, missed: tuple[int, ...]) -> list[tuple[int, slice]]:
        """The longest stretches of the sub-group that one kernel call can step, each with its first piece:
        their pieces are alike in param group and history. missed: pieces without a gradient, which lie in no
        stretch. Step counts that somebody has written since the last step are read, which waits for them.
        """
        if self._counted not in (None, self.steps._version):
            self._counted = self.steps._version
            for piece, steps in zip(self.pieces, self.steps.tolist(), strict=True):
                self.take_steps(piece, steps)
        if self._runs is None or self._runs[0] != missed:  # a step has mostly those of the one before
            self._runs = missed, list(self._find_runs(missed))
        return self._runs[1]

    def _find_runs(self, missed: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
        def key(item: tuple[int, SteppedPiece]) -> tuple[int, int] | None:
            index, piece = item
            return None if index in missed else (piece.param_group, piece.history)

        for alike, run in itertools.groupby(enumerate(self.pieces), key):
            if alike is not None:
                pieces = list(run)
                (first, begin), (_, end) = pieces[0], pieces[-1]
                yield first, slice(begin.piece.shard_start, end.piece.shard_slice.stop)


Turn = tuple[SteppedSubGroup, StepGradients]
"""A sub-group to be stepped, and its gradients."""
