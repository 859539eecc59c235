"""A step by the user's optimizer itself, where no kernel serves it: of slices, or of whole parameters.

Slices are stepped where the masters are. Whole parameters are put together for the step, each on the rank
that has its optimizer state, and are slices again afterwards. A rank that runs out of memory, or whose
optimizer fails, tells the others before they wait for it: all ranks meet before each collective, once each
has what it needs for it.
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
from zero.gradients.absent import AbsentGradients
from zero.gradients.group_gradients import GroupGradients
from zero.optimizer.joint import name_of
from zero.optimizer.owned import OwnedSubGroup, Turn
from zero.optimizer.parameter_exchange import ParameterExchange
from zero.optimizer.pieces import bind, home_of, shaped, show
from zero.tiers.room import room_for
from zero.tiers.stores import Stores
from zero.tiers.tracer import Tracer
from zero.tiers.values import Values, fetch


class OwnStep:
    """optimizers: those that step themselves. tracer: told when a sub-group has the gradients that it is
    stepped with, and after the step. gradient_bytes, value_bytes: bytes of the device in use for fp32
    gradients, and for whole parameters."""

    def __init__(
        self, optimizers: Sequence[Optimizer], stores: Stores, communicator: Communicator, tracer: Tracer
    ) -> None:
        self.gradient_bytes = 0
        self.value_bytes = 0
        self._optimizers = tuple(optimizers)
        self._names = name_of(*optimizers)
        self._stores = stores
        self._communicator = communicator
        self._tracer = tracer
        self._accelerator = stores.accelerator
        self._exchange = ParameterExchange(stores, communicator)
        self._whole: dict[OwnedSubGroup, Tensor] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._absent = AbsentGradients()
        self._meets = False  # whether this step has collectives

    def run(self, turns: Sequence[Turn], scale: Tensor | None) -> None:
        """Step these sub-groups."""
        turns = [(owned, have) for owned, have in turns if owned.routes is None or owned.routes.total]
        subs = [owned for owned, _ in turns]
        self._meets = any(owned.routes is not None for owned in subs)
        try:
            for owned, have in turns:
                self._arrive(owned, have, scale)
                self._tracer.mark("step", owned.group.unit)
            with self._alone():
                self._step_together(subs)
                way_back = self._room_for_way_back()
            self._meet()
            self._tracer.mark("step", "")
            for owned in self._whole:
                self._leave(owned, way_back)
        finally:
            self._clear(subs)
        for owned in subs:
            self._stores.weight_writer(owned.sub.shard, owned.sub.kept.opened().master).deliver_master()

    def bytes_for(self, owned: OwnedSubGroup) -> int:
        """The most bytes that stepping a record on the device takes: what stays until all are stepped, and
        the exchange."""
        each = owned.sub.kept.master.element_size()
        return each * (owned.numel if owned.routes is None else 2 * owned.numel + owned.sub.numel)

    def _arrive(self, owned: OwnedSubGroup, have: GroupGradients, scale: Tensor | None) -> None:
        """Bring what a sub-group is stepped with: its gradients, and the whole parameters if these are
        stepped."""
        master = owned.sub.kept.opened().master
        if owned.routes is not None:
            whole = self._assemble(owned, master, "for whole parameters of")
            self.value_bytes += self._on_device(whole)
            self._whole[owned] = whole
            for piece in owned.pieces:
                bind(piece, shaped(whole, owned.group, piece.piece))
        came = self._of_pieces(owned, have)
        with self._alone(), self._room("for the fp32 gradients of", owned):
            gradient = self._wide(came, master, scale)
        if owned.routes is not None or gradient is not came:
            self.gradient_bytes += self._on_device(gradient)
        for piece in owned.pieces:
            if piece.piece.index in have.used:
                self._gradients[piece.parameter] = shaped(gradient, owned.group, piece.piece)

    def _of_pieces(self, owned: OwnedSubGroup, have: GroupGradients) -> Tensor:
        """The gradients of a sub-group's pieces, one after another, in the memory of the master."""
        purpose, values = "for the fp32 gradients of", owned.sub.of(have.slice.get())
        if owned.routes is not None:
            return self._assemble(owned, values, purpose)
        with self._alone(), self._room(purpose, owned):
            return fetch(values, home_of(owned), self._communicator)

    def _assemble(self, owned: OwnedSubGroup, values: Values, purpose: str) -> Tensor:
        """Whole parameters, put together from all ranks' parts of them in `values`, in the memory of the
        master."""
        assert owned.routes is not None
        with self._alone(), self._room(purpose, owned):
            parts = self._exchange.parts_of(owned.routes, values)
            whole = parts.new_empty(owned.numel)
        self._meet()
        self._exchange.assemble(owned.group.unit, owned.routes, parts, whole)
        del parts
        with self._alone():
            return whole.to(home_of(owned))

    def _wide(self, gradient: Tensor, master: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None and gradient.dtype is master.dtype:
            return gradient
        wide = torch.empty_like(gradient, dtype=master.dtype)
        scale = None if scale is None else scale.to(master.device)
        self._stores.kernels(master.device).scale_cast(wide, gradient, scale)
        return wide

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Around what a rank does by itself. If that fails, the others hear of it when they next meet, and
        wait for nothing else from this rank."""
        try:
            yield
        except Exception:
            if self._meets:
                self._communicator.agree(True)
            raise

    def _meet(self) -> None:
        """Before a collective, if the step has any: make sure that all ranks have come through what each does
        by itself. Raises OptimizerError if one has failed."""
        if self._meets and self._communicator.agree():
            raise OptimizerError(f"the step of {self._names} failed on another rank, whose error says why")

    def _room(self, purpose: str, owned: OwnedSubGroup) -> AbstractContextManager[None]:
        numel = owned.numel + (0 if owned.routes is None else owned.sub.numel)
        nbytes = owned.sub.kept.master.element_size() * numel
        return room_for(self._accelerator, purpose, owned.group.unit, nbytes)

    def _step_together(self, subs: Sequence[OwnedSubGroup]) -> None:
        """Run the optimizers' steps, whatever tensors they put the values into."""
        nbytes = sum(4 * owned.numel for owned in subs)
        with room_for(self._accelerator, f"for the step of {self._names}", None, nbytes):
            self._absent.show(self._gradients)
            for optimizer in self._optimizers:
                # After all other hooks, which would take a slice for a gradient.
                handle = optimizer.register_step_pre_hook(self._hand_over)
                try:
                    optimizer.step()
                finally:
                    handle.remove()
        for owned in subs:
            values = self._whole.get(owned, owned.sub.kept.opened().master)
            for piece in owned.pieces:
                place = shaped(values, owned.group, piece.piece)
                if piece.parameter.data_ptr() != place.data_ptr():
                    place.copy_(piece.parameter.detach())
                    bind(piece, place)

    def _hand_over(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Give the optimizer's parameters their gradients."""
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if (gradient := self._gradients.get(parameter)) is not None:
                parameter.grad = gradient

    def _room_for_way_back(self) -> Tensor:
        """Memory of the device through which whole parameters go back, one sub-group after another."""
        sizes = [
            self._exchange.way_back_bytes(o.routes, whole) for o, whole in self._whole.items() if o.routes
        ]
        nbytes, device = max(sizes, default=0), self._accelerator.device
        with room_for(self._accelerator, "to take whole parameters apart", None, nbytes):
            room = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.value_bytes += room.nbytes
        return room

    def _leave(self, owned: OwnedSubGroup, room: Tensor) -> None:
        """Send stepped whole parameters back to the ranks' masters."""
        assert owned.routes is not None
        master = owned.sub.kept.opened().master
        self._exchange.take_apart(owned.group.unit, owned.routes, self._whole[owned], room, master)

    def _on_device(self, values: Tensor) -> int:
        return values.nbytes if values.device == self._accelerator.device else 0

    def _clear(self, subs: Sequence[OwnedSubGroup]) -> None:
        self.gradient_bytes = self.value_bytes = 0
        self._whole.clear()
        self._gradients.clear()
        self._absent.hide()
        for owned in subs:
            for piece in owned.pieces:
                piece.parameter.grad = None
                if owned.routes is not None:
                    show(owned, piece)
