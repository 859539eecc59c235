"""The gradients of an optimizer step as loops see them: norms, products, whole values and changes of them.

What the engine holds are slices of the sum over ranks. They stand for that sum times a mean factor and times
what the loop has multiplied them by since. A factor that all gradients share stays a number, which the
optimizer's kernel applies; others are applied to the slices.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero.communication.communicator import Communicator
from zero.errors import UsageError, some
from zero.gradients.factor import GradientFactor, clip_coefficient
from zero.gradients.group_gradients import GroupGradients
from zero.gradients.reducer import GradientReducer
from zero.optimizer.joint import members
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.sharding.guard import SCHEDULES
from zero.sharding.stand_in import Multiplier, PieceGradient, ShardedGradient, StandIns
from zero.tiers.values import changing, in_memory
from zero.whole.full_parameters import FullParameters


@dataclass(eq=False, repr=False)
class HeldGradients:
    """What stands behind the stand-ins of one engine.

    changes: is given what the program has changed before a step, which must be the same on all ranks.
    """

    reducer: GradientReducer
    factor: GradientFactor
    communicator: Communicator
    full_parameters: FullParameters
    optimizer: ShardedOptimizer
    changes: dict[str, Any]

    def __post_init__(self) -> None:
        self._places = {
            parameter: (gradients, index)
            for gradients in self.reducer.all
            for index, parameter in enumerate(gradients.group.parameters)
        }
        self._numbers = {parameter: number for number, parameter in enumerate(self._places)}
        self._stand_ins = StandIns(ShardedGradient)
        self._of_pieces = StandIns(PieceGradient)
        self._pieces_shown = False  # and not yet looked at by a step
        self.optimizer.installed.moved = weakref.WeakMethod(self._show_moved_pieces)
        self._multipliers: dict[nn.Parameter, tuple[Multiplier, ...]] = {}
        self._pieces: dict[GroupGradients, Tensor] = {}
        self._times: Tensor | None = None
        self._copied: tuple[Tensor, int, Tensor] | None = None  # the last multiplier, its version, a copy
        self._dropped: set[nn.Parameter] = set()  # whose old values are still there
        self._unscaled = False  # by a GradScaler
        self._norms: dict[float, tuple[Tensor, ...]] = {}  # of the slices' sums, by order and parameter

    # -- what stand-ins ask for ----------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the model, where numbers that multiply gradients may be."""
        return self.full_parameters.device

    def norms_of(self, parameters: Sequence[nn.Parameter], order: float = 2.0) -> Tensor:
        """The norms of these gradients, (parameters,), fp32. The first call of an order is collective."""
        if order not in self._norms:
            self._norms[order] = self._measure(order).unbind()
        known = self._norms[order]
        found = torch.stack([known[self._numbers[each]] for each in parameters])
        for norm, parameter in zip(found, parameters, strict=True) if self._multipliers else ():
            for by in self._multipliers.get(parameter, ()):
                norm.mul_(abs(_on(by, norm)))
        return found

    def multiply(self, parameters: Iterable[nn.Parameter], by: Multiplier) -> None:
        """Multiply gradients."""
        if isinstance(by, Tensor):
            by = self._copy_of(by)
        for parameter in parameters:
            self._multipliers[parameter] = (*self._multipliers.get(parameter, ()), by)

    def _copy_of(self, number: Tensor) -> Tensor:
        """The number as it is now, 0-dim, which the program may change before the step. For all gradients
        that are multiplied by the same tensor there is one copy, so that it counts as shared."""
        source, version, copy = self._copied or (None, -1, number)
        if source is not number or version != number._version:
            copy = number.detach().reshape(()).clone()
            self._copied = number, number._version, copy
        return copy

    def zero(self, parameter: nn.Parameter) -> None:
        """Make one gradient zero; infinite and NaN ones, too."""
        gradients, index = self._places[parameter]
        self._multipliers.pop(parameter, None)
        gradients.zero_unreduced(index)
        self._change(parameter, lambda values, _: values.zero_())

    def drop(self, parameters: Set[nn.Parameter]) -> None:
        """Drop these gradients: as long as no others come, their parameters take no part in a step. What is
        left of them is made zero when it would count; often all others are dropped before."""
        for parameter in parameters:
            gradients, index = self._places[parameter]
            gradients.forget(index)
        self._dropped |= parameters
        self._stand_ins.hide(parameters)

    def used_by(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Those of an optimizer's parameters that have gradients."""
        mine = self.optimizer.of(optimizer, self.reducer.all)
        return [have.group.parameters[index] for have in mine for index in have.used]

    def full(self, parameter: nn.Parameter) -> Tensor:
        """One whole gradient, fp32. Collective."""
        gradients, index = self._places[parameter]
        with gradients.group.room_for_whole(torch.float32):
            name = gradients.group.names[index]
            value = self.full_parameters.parameter(name, self.reducer.summed(gradients))
            for factor in self.factors_of(parameter):
                value.mul_(_on(factor, value))
        return value

    def factors_of(self, parameter: nn.Parameter) -> tuple[Multiplier, ...]:
        """What one gradient is, as a multiple of the sum over ranks."""
        mean = self.factor.mean()
        return (*(() if mean is None else (mean,)), *self._multipliers.get(parameter, ()))

    def put(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Replace one gradient."""
        gradients, index = self._places[parameter]
        self._multipliers.pop(parameter, None)
        mean, slot = self.factor.mean(), gradients.group.layout.slots[index]
        flat = whole.new_empty_strided(slot.shape, slot.stride).copy_(whole).as_strided((slot.numel,), (1,))

        def replace(values: Tensor, part: slice) -> None:
            value = flat[part].to(values.device, torch.float32)
            values.copy_(value if mean is None else value / _on(mean, value))

        self._change(parameter, replace)

    # -- the step --------------------------------------------------------------------------------------

    def show(self) -> None:
        """Put stand-ins in place of gradients: the last backward of a step is over."""
        self._stand_ins.show(self.reducer.used(), self)
        self.show_pieces()

    def show_pieces(self) -> None:
        """Put stand-ins in place of the gradients of the optimizer's parameters: after `show`, and after a
        step, which takes them away."""
        sharded = self.optimizer
        having = [
            sharded.installed.first_of(each)
            for each in members(sharded.optimizer)
            if any(have.used for have in sharded.of(each, self.reducer.all))
        ]
        self._of_pieces.show(having, self)
        self._pieces_shown = True

    def _show_moved_pieces(self) -> None:
        if self._pieces_shown:
            self.show_pieces()

    def resume(self) -> None:
        """Take them away for another backward, whose gradients are added to these.

        Raises UsageError for gradients that were replaced.
        """
        self._take_in()
        if (by := self.factor.rescaling()) is not None:
            self.multiply(self.reducer.used(), by)
        self._apply_multipliers()
        self.hide()

    def make_way(self, parameter: nn.Parameter) -> None:
        """Take one away for a gradient that a backward adds, which begins only now."""
        self._stand_ins.hide({parameter})

    def hide(self) -> None:
        """Take them away: there are no gradients any more."""
        self.factor.drop()
        self._unscaled = False
        self._pieces_shown = False
        self._stand_ins.hide()
        self._of_pieces.hide()
        self._multipliers.clear()
        self._dropped.clear()
        self._copied = None
        self._norms.clear()

    def aside(self) -> AbstractContextManager[None]:
        """Wrap what may be compiled: in the block, the model's parameters have no gradients."""
        return self._stand_ins.aside()

    def settle(self) -> tuple[Multiplier, ...]:
        """Heed what the program has changed, before the step. Returns what multiplies all gradients.

        Parameters whose `grad` is None now take no part. Raises UsageError for gradients that were replaced,
        and for those that nobody has divided by the number that their loss was multiplied by.
        """
        if self.factor.by_program and not self._unscaled:
            raise UsageError(_NOT_SCALED)
        if any(self._of_pieces.changed()):
            raise UsageError(_OPTIMIZERS)
        self._pieces_shown = False
        self._take_in()
        shared = self._shared_multipliers()
        all_norms = self.communicator.alike is self.communicator.whole  # not only this stage's
        if all_norms and self.factor.norm is None and (norms := self._norms.get(2.0)):
            self.factor.norm = torch.linalg.vector_norm(torch.stack(norms))  # the program has measured it
        how: list[Any] = _told(shared or ())
        if shared is None:
            how = [[self._name(p), *_told(by)] for p, by in self._multipliers.items()]
        self.changes["how gradients were multiplied before the last step"] = how
        if shared is None:
            self._apply_multipliers()
        for gradients in self.reducer.all:
            gradients.drop_kept()
        return shared or ()

    def check_none_given(self) -> None:
        """Raise UsageError for gradients that came by no backward that the engine has seen."""
        if given := self._stand_ins.others(self._places):
            raise UsageError(_GIVEN.format(some([self._name(each) for each in given])))

    def _take_in(self) -> None:
        """Drop the gradients that the program has removed, and make what is dropped zero. Raises UsageError
        for those that it has replaced."""
        self.check_none_given()
        removed, replaced = self._stand_ins.changed()
        if replaced:
            raise UsageError(_REPLACED.format(some([self._name(each) for each in replaced])))
        self.changes["parameters whose `.grad` was removed"] = [self._name(each) for each in removed]
        self.drop(set(removed))
        for parameter in self._dropped:
            self.zero(parameter)
        self._dropped.clear()

    def _shared_multipliers(self) -> tuple[Multiplier, ...] | None:
        """What multiplies all gradients; None where they are multiplied by different numbers."""
        if not self._multipliers:
            return ()
        every = [self._multipliers.get(parameter, ()) for parameter in self.reducer.used()]
        first = every[0] if every else ()
        same = all(len(each) == len(first) and all(map(_same, each, first)) for each in every)
        return first if same else None

    def _apply_multipliers(self) -> None:
        def multiply(by: Multiplier, values: Tensor, part: slice) -> None:
            values.mul_(_on(by, values))

        for parameter in self.reducer.used():
            for each in self._multipliers.pop(parameter, ()):
                self._change(parameter, partial(multiply, each))

    def unscale(self, pieces: Iterable[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
        """What a GradScaler does to the gradients of an optimizer. Collective.

        pieces: one of its parameters. found_inf: becomes 1.0 where a gradient is not finite. inverse:
        multiplies all gradients.
        """
        (piece,), sharded = pieces, self.optimizer
        optimizer = next(o for o in members(sharded.optimizer) if sharded.installed.first_of(o) is piece)
        parameters = self.used_by(optimizer)
        self._unscaled = True
        if parameters or self.communicator.divided:
            norms = self.norms_of(parameters) if parameters else torch.zeros(1)
            found = (~torch.isfinite(norms)).any().to(self.full_parameters.device, torch.float32)
            if self.communicator.divided:  # all ranks of the job skip the step, or none
                self.communicator.all_reduce("overflow", found, self.communicator.whole, "max").wait()
            found = found.to(found_inf.device, found_inf.dtype)
            found_inf.copy_(torch.maximum(found_inf, found.reshape(found_inf.shape)))
        self.multiply(parameters, inverse)

    def clip(self, max_norm: float) -> Tensor:
        """Multiply all gradients so that their L2 norm is at most `max_norm`; return the norm before.
        Collective."""
        self._take_in()
        shared = self._shared_multipliers()
        if shared is None:
            self._apply_multipliers()
        norm = self.factor.measure(self.reducer, self.factor.product(shared or ())).clone()
        self.factor.norm = norm.clone()
        coefficient = clip_coefficient(norm, max_norm)
        self.multiply(self.reducer.used(), coefficient)
        return norm

    def norms(self) -> dict[str, Tensor]:
        """The L2 norm of every parameter's gradient, by name. Collective, once."""
        used = list(self.reducer.used())
        norms = self.norms_of(used).unbind() if used else ()
        return {self._name(parameter): norm for parameter, norm in zip(used, norms, strict=True)}

    def _name(self, parameter: nn.Parameter) -> str:
        gradients, index = self._places[parameter]
        return gradients.group.names[index]

    # -- inside ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _measure(self, order: float) -> Tensor:
        """Every parameter's norm, fp32, (parameters,), times the mean factor. One collective.

        Of parameters that differ by rank, the norm is that of all values in the parameter's place.
        """
        total = torch.zeros(len(self._places), dtype=torch.float32, device=self.full_parameters.device)
        with self.communicator.postponing_disk_errors():
            for gradients in self.reducer.all:
                if gradients.slice.present:
                    self._put_norms(gradients, order, total)
        ranks = self.communicator.alike
        if any(gradients.times < ranks.size for gradients in self.reducer.all):
            finite = math.isfinite(order)
            total = total.pow_(order) if finite else total
            if finite and any(gradients.times > 1 for gradients in self.reducer.all):
                total /= self._times_on(total.device)
            self.communicator.all_reduce("gradient norms", total, ranks, "sum" if finite else "max").wait()
            total = total.pow_(1 / order) if finite else total
        mean = self.factor.mean()
        return total if mean is None else total.mul_(mean)

    def _times_on(self, device: torch.device) -> Tensor:
        """How many ranks have the same values of each parameter, (parameters,), on the device."""
        if self._times is None:
            times = [gradients.times for gradients, _ in self._places.values()]
            self._times = torch.tensor(times, dtype=torch.float32, device=device)
        return self._times

    def _put_norms(self, gradients: GroupGradients, order: float, total: Tensor) -> None:
        """Put the norms of this rank's parts of one group's gradients in their places."""
        here, group = in_memory(gradients.slice.get()), gradients.group
        if group.pieces:
            parts = [here[piece.shard_slice] for piece in group.pieces]
            norms = self.reducer.norms_of(parts, order)
            total[self._places_of(gradients, total.device)] = norms.to(total.device)

    def _places_of(self, gradients: GroupGradients, device: torch.device) -> Tensor:
        """The numbers of the parameters that this rank has parts of, on the device."""
        if gradients not in self._pieces:
            group = gradients.group
            numbers = [self._numbers[group.parameters[piece.index]] for piece in group.pieces]
            self._pieces[gradients] = torch.tensor(numbers, device=device)
        return self._pieces[gradients]

    def _change(self, parameter: nn.Parameter, change: Callable[[Tensor, slice], Any]) -> None:
        """Change this rank's part of one gradient. change(values, which elements of the parameter)."""
        self._norms.clear()
        gradients, index = self._places[parameter]
        gradients.drop_kept()
        for piece in gradients.group.pieces:
            if piece.index == index and gradients.slice.present:
                with (
                    self.communicator.postponing_disk_errors(),
                    changing(gradients.slice.get()[piece.shard_slice]) as values,
                ):
                    change(values, slice(piece.start, piece.start + piece.length))


def _told(multipliers: Iterable[Multiplier]) -> list[float | None]:
    """The numbers among them; those on the device are not read."""
    return [None if isinstance(each, Tensor) else each for each in multipliers]


def _on(number: Multiplier, beside: Tensor) -> Any:
    """The number, on the device of what it is multiplied with."""
    return number.to(beside.device) if isinstance(number, Tensor) else number


def _same(one: Multiplier, other: Multiplier) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return one == other


_REPLACED = (
    "`.grad` was replaced between backward() and step(): {}. The engine steps the gradients that it holds: "
    "change those in place, as in p.grad.copy_(...), on every rank"
)
_GIVEN = (
    "`.grad` was set by something else than a backward: {}. The engine steps the gradients of backwards: "
    "begin with none, optimizer.zero_grad(), instead of zeros, and change them in place afterwards, as in "
    "p.grad.copy_(...), on every rank. " + SCHEDULES
)
_OPTIMIZERS = (
    "`.grad` of what is in optimizer.param_groups was removed or replaced between backward() and step(), "
    "which does not change the gradients that the engine holds: call optimizer.zero_grad(), or "
    "model.zero_grad()"
)
_NOT_SCALED = (
    "precision='fp16' needs a loss scale, and the gradients of loss.backward() have none: multiply losses by "
    "torch.amp.GradScaler, which unscales in its step(optimizer), or call engine.backward(loss), which has "
    "the engine's own"
)
