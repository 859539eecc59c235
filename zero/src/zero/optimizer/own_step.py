"""A step by the user's optimizer itself, which no kernel serves: of slices, or of whole parameters.

Slices are stepped where the masters are. Whole parameters are put together for the step, each on the rank
that has its optimizer state, and are slices again behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelz.flat_buffer import rebind
from zero.communication.communicator import Communicator
from zero.gradients.group_gradients import GroupGradients
from zero.optimizer.exchange import Exchange
from zero.optimizer.joint import name_of
from zero.optimizer.owned import OwnedSubGroup
from zero.optimizer.pieces import piece_of_master, shaped
from zero.tiers.room import room_for
from zero.tiers.stores import Stores
from zero.tiers.values import fetch

Turn = tuple[OwnedSubGroup, GroupGradients]


class OwnStep:
    """wide_bytes: of the device, in use for fp32 gradients and whole parameters."""

    def __init__(self, optimizer: Optimizer, stores: Stores, communicator: Communicator) -> None:
        self.wide_bytes = 0
        self._optimizer = optimizer
        self._stores = stores
        self._communicator = communicator
        self._accelerator = stores.accelerator
        self._exchange = Exchange(stores, communicator)
        self._whole: dict[OwnedSubGroup, Tensor] = {}

    def run(self, turns: Sequence[Turn], scale: Tensor | None, mark: Callable[[str], None]) -> None:
        """mark(unit): called when it has the gradients that it is stepped with, and with "" behind the
        step."""
        pieces = [piece.parameter for owned, _ in turns for piece in owned.pieces]
        purpose = f"for the step of {name_of(self._optimizer)}"
        try:
            for owned, have in turns:
                self._arrive(owned, have, scale)
                mark(owned.group.unit)
            if any(have.group.placement.gradients == "disk" for _, have in turns):
                self._communicator.agree()
            with room_for(self._accelerator, purpose, None, sum(p.nbytes for p in pieces)):
                self._optimizer.step()
            mark("")
            for owned, whole in self._whole.items():
                self._exchange.take_apart(owned, whole, owned.sub.kept.opened().master)
        finally:
            self._clear([owned for owned, _ in turns])
        for owned, _ in turns:
            self._stores.outlet(owned.sub.shard, owned.sub.kept.opened().master).deliver_master()

    def _arrive(self, owned: OwnedSubGroup, have: GroupGradients, scale: Tensor | None) -> None:
        """Where pieces are whole parameters, their values; and the gradients of all."""
        master, unit = owned.sub.kept.opened().master, owned.group.unit
        numel = owned.sub.numel if owned.routes is None else owned.routes.numel
        if owned.routes is not None:
            with room_for(self._accelerator, "for whole parameters of", unit, 4 * numel):
                self._show_whole(owned, master)
        with room_for(self._accelerator, "for the fp32 gradients of", unit, 4 * numel):
            came = self._of_pieces(owned, have)
            gradient = self._wide(came, master, scale)
        if owned.routes is not None or gradient is not came:
            self._count(gradient)
        for piece in owned.pieces:
            if piece.piece.index in have.used:
                piece.parameter.grad = shaped(gradient, owned.group, piece.piece)

    def _of_pieces(self, owned: OwnedSubGroup, have: GroupGradients) -> Tensor:
        """The gradients of a sub-group's pieces one after another, beside the master."""
        values, device = owned.sub.of(have.slice.get()), owned.sub.kept.opened().master.device
        if owned.routes is None:
            return fetch(values, device)
        return self._exchange.assemble(owned, values).to(device)

    def _wide(self, gradient: Tensor, master: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None and gradient.dtype is master.dtype:
            return gradient
        wide = torch.empty_like(gradient, dtype=master.dtype)
        scale = None if scale is None else scale.to(master.device)
        self._stores.kernels(master.device).scale_cast(wide, gradient, scale)
        return wide

    def _show_whole(self, owned: OwnedSubGroup, master: Tensor) -> None:
        whole = self._exchange.assemble(owned, master).to(master.device)
        self._count(whole)
        self._whole[owned] = whole
        for piece in owned.pieces:
            rebind(piece.parameter, shaped(whole, owned.group, piece.piece))

    def _count(self, values: Tensor) -> None:
        self.wide_bytes += values.nbytes if values.device == self._accelerator.device else 0

    def _clear(self, subs: Sequence[OwnedSubGroup]) -> None:
        self.wide_bytes = 0
        self._whole.clear()
        for owned in subs:
            for piece in owned.pieces:
                piece.parameter.grad = None
                if owned.routes is not None:
                    rebind(piece.parameter, piece_of_master(owned, piece.piece))
