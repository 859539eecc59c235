"""A step by the user's optimizer itself, where no kernel serves it: of slices, or of whole parameters.

Slices are stepped where the masters are. Whole parameters are put together for the step, each on the rank
that has its optimizer state, and are slices again afterwards. A rank that runs out of memory, or whose
optimizer fails, holds up no other: it takes part in the collectives that follow, with whatever values there
are, until the ranks next meet. They meet when all have the memory for what is to come, when everything has
arrived, and when all have stepped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.communication.communicator import Communicator
from zero.errors import OptimizerError
from zero.optimizer.joint import name_of, parameters_of
from zero.optimizer.parameter_exchange import ParameterExchange, join
from zero.optimizer.pieces import bind, shaped, show
from zero.optimizer.stepped import StepGradients, SteppedSubGroup, Turn
from zero.optimizer.taken_over import own_step
from zero.ranges import in_range
from zero.sharding.shard_source import fetch
from zero.sharding.stand_in import PieceGradient, StandIns
from zero.tiers.device_bytes import Tracer
from zero.tiers.room import room_for
from zero.tiers.stores import Stores
from zero.tiers.values import Values
from zero.tiers.weight_writer import WeightWriter


class SelfStepping:
    """optimizers: those that step themselves. tracer: told when a sub-group has the gradients that it is
    stepped with, and after the step. gradient_bytes, value_bytes: bytes of the device in use for fp32
    gradients, and for whole parameters."""

    def __init__(
        self, optimizers: Sequence[Optimizer], stores: Stores, communicator: Communicator, tracer: Tracer
    ) -> None:
        self.optimizers = tuple(optimizers)
        self._names = name_of(*optimizers)
        self._stores = stores
        self._communicator = communicator
        self._tracer = tracer
        self._accelerator = stores.accelerator
        self._exchange = ParameterExchange(stores, communicator)
        self._whole: dict[SteppedSubGroup, Tensor] = {}
        self._wide: dict[SteppedSubGroup, Tensor] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._absent = StandIns(PieceGradient)
        self._meets = False  # whether this step has collectives
        self._joins_blocks = False  # whether these are among ranks with the same data, too
        self._failure: Exception | None = None  # of this rank, until the ranks meet

    @property
    def gradient_bytes(self) -> int:
        return sum(map(self._on_device, self._wide.values()))

    @property
    def value_bytes(self) -> int:
        return sum(map(self._on_device, self._whole.values())) + self._exchange.nbytes

    @in_range("update")
    def run(
        self, optimizers: Sequence[Optimizer], turns: Sequence[Turn], scale: Tensor | None, joins_blocks: bool
    ) -> None:
        """Step these sub-groups. optimizers: those that have parameters of them. joins_blocks: whether blocks
        of parameters are put together, so that ranks with the same data meet, too."""
        turns = [turn for turn in turns if _changes_any(*turn)]
        subs = [stepped for stepped, _ in turns]
        exchanged = [(stepped, have) for stepped, have in turns if stepped.routes is not None]
        self._meets = bool(exchanged)
        self._joins_blocks = joins_blocks and self._check_gradients(exchanged)
        try:
            with self._alone():
                self._make_room(exchanged, scale)
            self._meet()
            for stepped, have in turns:
                self._arrive(stepped, have, scale)
                self._tracer.mark("step", stepped.group.unit)
            self._exchange.close()
            self._meet()
            with self._alone():
                self._step_together(optimizers, subs)
                self._open_exchange([self._way_back(stepped) for stepped in self._whole])
            self._meet()
            self._tracer.mark("step", "")
            for stepped in self._whole:
                self._leave(stepped)
        finally:
            self._clear(subs)
        for stepped in subs:
            WeightWriter(self._stores, stepped.sub.shard, stepped.record.opened()).deliver_master()

    def bytes_for(self, subs: Sequence[SteppedSubGroup]) -> int:
        """The most bytes that stepping these records on the device takes: what stays until all are stepped,
        and the room that they share for exchanges."""
        each = {stepped: stepped.record.master.element_size() for stepped in subs}
        routed = [(stepped, stepped.routes) for stepped in subs if stepped.routes is not None]
        stays = sum(each[stepped] * stepped.numel * (1 if stepped.routes is None else 2) for stepped in subs)
        parts = max((each[stepped] * stepped.sub.numel for stepped, _ in routed), default=0)
        wholes = max((each[stepped] * (r.numel + r.scattered) for stepped, r in routed), default=0)
        return stays + parts + wholes

    def _make_room(self, turns: Sequence[Turn], scale: Tensor | None) -> None:
        """Allocate what arrives from other ranks: whole parameters and their gradients."""
        for stepped, _ in turns:
            master = stepped.master
            with self._room("for whole parameters of", stepped):
                whole = self._whole[stepped] = master.new_empty(stepped.numel)
            with self._room("for the fp32 gradients of", stepped):
                self._wide[stepped] = master.new_empty(stepped.numel)
            for piece in stepped.pieces:
                bind(piece, shaped(whole, stepped.specs, piece.piece))
        self._open_exchange([self._way_there(turn, scale) for turn in turns])

    def _way_there(self, turn: Turn, scale: Tensor | None) -> tuple[int, int]:
        """Bytes of the room in which a sub-group's values and gradients are exchanged."""
        stepped, have = turn
        assert stepped.routes is not None
        master = stepped.master
        ways: list[tuple[Values, Tensor | None]] = [(master, None), (have.slice.get(), scale)]
        sent = max(values.dtype.itemsize for values, _ in ways)
        came = max(
            0 if self._is_direct(stepped, each, master, by) else each.dtype.itemsize for each, by in ways
        )
        return sent * sum(stepped.routes.given), came * stepped.routes.numel

    def _way_back(self, stepped: SteppedSubGroup) -> tuple[int, int]:
        """Bytes of the room in which stepped parameters go back."""
        assert stepped.routes is not None
        whole, routes = self._whole[stepped], stepped.routes
        near = 0 if stepped.joins_blocks else self._on_device(whole)
        each = whole.element_size()
        return each * sum(routes.given), whole.nbytes - near + each * routes.scattered

    def _is_direct(
        self, stepped: SteppedSubGroup, values: Values, target: Tensor, scale: Tensor | None
    ) -> bool:
        """Whether values arrive where the optimizer has them, and as it has them."""
        there = target.device == self._accelerator.device and not stepped.joins_blocks
        return there and values.dtype is target.dtype and scale is None

    def _arrive(self, stepped: SteppedSubGroup, have: StepGradients, scale: Tensor | None) -> None:
        """Bring what a sub-group is stepped with: its gradients, and the whole parameters if these are
        stepped."""
        if stepped.routes is None:
            with self._alone(), self._room("for the fp32 gradients of", stepped):
                self._give(stepped, have, self._slice(stepped, have, scale))
            return
        self._assemble(stepped, stepped.master, self._whole[stepped], None)
        self._assemble(stepped, stepped.sub.of(have.slice.get()), self._wide[stepped], scale)
        self._give(stepped, have, self._wide[stepped])

    def _slice(self, stepped: SteppedSubGroup, have: StepGradients, scale: Tensor | None) -> Tensor:
        """The gradients of a sub-group's pieces, one after another, in the memory and dtype of the master."""
        master = stepped.master
        came = fetch(stepped.sub.of(have.slice.get()), stepped.master.device, self._communicator)
        if scale is None and came.dtype is master.dtype:
            return came
        wide = self._wide[stepped] = torch.empty_like(came, dtype=master.dtype)
        self._widen(wide, came, scale)
        return wide

    def _give(self, stepped: SteppedSubGroup, have: StepGradients, gradient: Tensor) -> None:
        for piece in stepped.pieces:
            if piece.piece.index in have.used:
                self._gradients[piece.parameter] = shaped(gradient, stepped.specs, piece.piece)

    def _assemble(
        self, stepped: SteppedSubGroup, values: Values, target: Tensor, scale: Tensor | None
    ) -> None:
        """Fill `target` with whole parameters from all ranks' parts of them in `values`, times `scale`."""
        routes, ranks = stepped.routes, stepped.ranks
        assert routes is not None
        parts = self._exchange.parts(routes, values.dtype)
        with self._alone(), self._room("for the parts of", stepped):
            self._exchange.cut(routes, values, parts)
        direct = self._is_direct(stepped, values, target, scale)
        whole = target if direct else self._exchange.whole(routes, values.dtype)
        self._exchange.assemble(stepped.group.unit, ranks, routes, parts, whole)
        if not direct:
            with self._alone(), self._room("for whole parameters of", stepped):
                if not routes.joins_blocks:
                    self._widen(target, whole, scale)
                    return
                join(whole, routes, target)
                if scale is not None:
                    target.mul_(scale.to(target.device))

    def _widen(self, target: Tensor, values: Tensor, scale: Tensor | None) -> None:
        if scale is None and values.dtype is target.dtype:
            target.copy_(values)
        else:
            scale = None if scale is None else scale.to(target.device)
            self._stores.kernels(target.device).scale_cast(target, values.to(target.device), scale)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Around what a rank does by itself. If that fails and the step has collectives, this rank goes on
        taking part in them until the ranks meet."""
        try:
            yield
        except Exception as error:
            if not self._meets:
                raise
            self._failure = self._failure or error

    def _meet(self) -> None:
        """Where the step has collectives, raise what this rank has come upon, or OptimizerError if another
        one has failed."""
        if not self._meets:
            return
        failed = self._communicator.agree(self._failure is not None)
        if self._joins_blocks:
            failed = self._communicator.on_any_alike("the step", failed)
        if self._failure is not None:
            raise self._failure
        if failed:
            raise OptimizerError(f"the step of {self._names} failed on another rank, whose error says why")

    def _check_gradients(self, turns: Sequence[Turn]) -> bool:
        """Whether any parameters that are put together from blocks have gradients. Collective. Raises
        RankMismatchError if ranks with the same data have gradients of different ones."""
        joined = [(stepped.group.names, have) for stepped, have in turns if stepped.joins_blocks]
        having = [names[index] for names, have in joined for index in sorted(have.used)]
        self._communicator.check_alike(lambda: {"which parameters have gradients": having})
        return bool(having)

    def _open_exchange(self, sizes: Sequence[tuple[int, int]]) -> None:
        nbytes = sum(max(each) for each in zip(*sizes, strict=True))
        if self._meets:
            with room_for(self._accelerator, "to exchange whole parameters", None, nbytes):
                self._exchange.open(sizes)

    def _room(self, purpose: str, stepped: SteppedSubGroup) -> AbstractContextManager[None]:
        numel = stepped.numel + (0 if stepped.routes is None else stepped.sub.numel)
        nbytes = stepped.record.master.element_size() * numel
        return room_for(self._accelerator, purpose, stepped.group.unit, nbytes)

    def _step_together(self, optimizers: Sequence[Optimizer], subs: Sequence[SteppedSubGroup]) -> None:
        """Run the optimizers' own steps, whatever tensors they put the values into."""
        nbytes = sum(4 * stepped.numel for stepped in subs)
        with room_for(self._accelerator, f"for the step of {self._names}", None, nbytes):
            self._absent.show(self._gradients)
            for optimizer in optimizers:
                # After all other hooks, which would take a slice for a gradient.
                handle = optimizer.register_step_pre_hook(self._hand_over)
                try:
                    own_step(optimizer)()
                finally:
                    handle.remove()
        for stepped in subs:
            values = self._whole.get(stepped, stepped.master)
            for piece in stepped.pieces:
                place = shaped(values, stepped.specs, piece.piece)
                if piece.parameter.data_ptr() != place.data_ptr():
                    place.copy_(piece.parameter.detach())
                    bind(piece, place)

    def _hand_over(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Give the optimizer's parameters their gradients, and others none: one may have a stand-in."""
        for parameter in parameters_of(optimizer):
            parameter.grad = self._gradients.get(parameter)

    def _leave(self, stepped: SteppedSubGroup) -> None:
        """Send stepped whole parameters back to the ranks' masters."""
        routes, ranks = stepped.routes, stepped.ranks
        assert routes is not None
        whole, master = self._whole[stepped], stepped.master
        self._exchange.take_apart(stepped.group.unit, ranks, routes, whole, master)

    def _on_device(self, values: Tensor) -> int:
        return values.nbytes if values.device == self._accelerator.device else 0

    def _clear(self, subs: Sequence[SteppedSubGroup]) -> None:
        self._exchange.close()
        self._failure = None
        self._whole.clear()
        self._wide.clear()
        self._gradients.clear()
        self._absent.hide()
        for stepped in subs:
            for piece in stepped.pieces:
                piece.parameter.grad = None
                if stepped.routes is not None:
                    show(stepped, piece)


def _changes_any(stepped: SteppedSubGroup, have: StepGradients) -> bool:
    """Whether a step changes any of a sub-group's parameters: so on all ranks that have parts of them."""
    if stepped.joins_blocks and not have.used:
        return False
    return stepped.routes is None or bool(stepped.routes.total)
