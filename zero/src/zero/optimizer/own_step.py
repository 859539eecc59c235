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
from zero.errors import OptimizerError
from zero.gradients.group_gradients import GroupGradients
from zero.optimizer.exchange import Exchange
from zero.optimizer.joint import name_of
from zero.optimizer.owned import OwnedSubGroup
from zero.optimizer.pieces import piece_of_master, shaped
from zero.tiers.room import room_for
from zero.tiers.stores import Stores
from zero.tiers.values import Values, fetch

Turn = tuple[OwnedSubGroup, GroupGradients]


class OwnStep:
    """optimizers: those that step themselves. gradient_bytes, value_bytes: of the device, in use for fp32
    gradients and for whole parameters."""

    def __init__(self, optimizers: Sequence[Optimizer], stores: Stores, communicator: Communicator) -> None:
        self.gradient_bytes = 0
        self.value_bytes = 0
        self._optimizers = tuple(optimizers)
        self._names = name_of(*optimizers)
        self._stores = stores
        self._communicator = communicator
        self._accelerator = stores.accelerator
        self._exchange = Exchange(stores, communicator)
        self._whole: dict[OwnedSubGroup, Tensor] = {}

    def run(self, turns: Sequence[Turn], scale: Tensor | None, mark: Callable[[str], None]) -> None:
        """mark(unit): called when it has the gradients that it is stepped with, and with "" behind the
        step."""
        turns = [(owned, have) for owned, have in turns if owned.routes is None or owned.routes.total]
        try:
            for owned, have in turns:
                self._arrive(owned, have, scale)
                mark(owned.group.unit)
            self._step_together(sum(4 * owned.numel for owned, _ in turns))
            mark("")
            for owned, _ in turns:
                self._leave(owned)
        finally:
            self._clear([owned for owned, _ in turns])
        for owned, _ in turns:
            self._stores.outlet(owned.sub.shard, owned.sub.kept.opened().master).deliver_master()

    def bytes_for(self, owned: OwnedSubGroup) -> int:
        """The most that a record on the device is stepped with, there until all are stepped, and that its
        exchange takes."""
        each = owned.sub.kept.master.element_size()
        return each * (owned.numel if owned.routes is None else 2 * owned.numel + owned.sub.numel)

    def _arrive(self, owned: OwnedSubGroup, have: GroupGradients, scale: Tensor | None) -> None:
        """Where pieces are whole parameters, their values; and the gradients of all."""
        master, unit = owned.sub.kept.opened().master, owned.group.unit
        nbytes = master.element_size() * (owned.numel + (0 if owned.routes is None else owned.sub.numel))
        if owned.routes is not None:
            with room_for(self._accelerator, "for whole parameters of", unit, nbytes):
                self._show_whole(owned, master)
        with room_for(self._accelerator, "for the fp32 gradients of", unit, nbytes):
            came = self._of_pieces(owned, have)
            gradient = self._wide(came, master, scale)
        if owned.routes is not None or gradient is not came:
            self.gradient_bytes += self._on_device(gradient)
        for piece in owned.pieces:
            if piece.piece.index in have.used:
                piece.parameter.grad = shaped(gradient, owned.group, piece.piece)

    def _show_whole(self, owned: OwnedSubGroup, master: Tensor) -> None:
        whole = self._assemble(owned, master).to(master.device)
        self.value_bytes += self._on_device(whole)
        self._whole[owned] = whole
        for piece in owned.pieces:
            rebind(piece.parameter, shaped(whole, owned.group, piece.piece))

    def _of_pieces(self, owned: OwnedSubGroup, have: GroupGradients) -> Tensor:
        """The gradients of a sub-group's pieces one after another, beside the master."""
        values, device = owned.sub.of(have.slice.get()), owned.sub.kept.opened().master.device
        if owned.routes is None:
            return fetch(values, device)
        return self._assemble(owned, values).to(device)

    def _assemble(self, owned: OwnedSubGroup, values: Values) -> Tensor:
        assert owned.routes is not None
        return self._exchange.assemble(owned.group.unit, owned.routes, values)

    def _wide(self, gradient: Tensor, master: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None and gradient.dtype is master.dtype:
            return gradient
        wide = torch.empty_like(gradient, dtype=master.dtype)
        scale = None if scale is None else scale.to(master.device)
        self._stores.kernels(master.device).scale_cast(wide, gradient, scale)
        return wide

    def _step_together(self, nbytes: int) -> None:
        """The optimizers' steps. Where one fails, no other rank waits for the parameters of this one."""
        error: Exception | None = None
        try:
            with room_for(self._accelerator, f"for the step of {self._names}", None, nbytes):
                for optimizer in self._optimizers:
                    optimizer.step()
        except Exception as problem:
            error = problem
        elsewhere = bool(self._whole) and self._communicator.agree(error is not None)
        if error is not None:
            raise error
        if elsewhere:
            raise OptimizerError(
                f"the step of {self._names} has failed on another rank, whose error says why"
            )

    def _leave(self, owned: OwnedSubGroup) -> None:
        """Values to the masters, whatever tensors the optimizer has put them into."""
        master = owned.sub.kept.opened().master
        stepped = self._whole.get(owned, master)
        for piece in owned.pieces:
            place = shaped(stepped, owned.group, piece.piece)
            if piece.parameter.data_ptr() != place.data_ptr():
                place.copy_(piece.parameter.detach())
                rebind(piece.parameter, place)
        if owned.routes is not None:
            self._exchange.take_apart(owned.group.unit, owned.routes, stepped, master)

    def _on_device(self, values: Tensor) -> int:
        return values.nbytes if values.device == self._accelerator.device else 0

    def _clear(self, subs: Sequence[OwnedSubGroup]) -> None:
        self.gradient_bytes = self.value_bytes = 0
        self._whole.clear()
        for owned in subs:
            for piece in owned.pieces:
                piece.parameter.grad = None
                if owned.routes is not None:
                    rebind(piece.parameter, piece_of_master(owned, piece.piece))
