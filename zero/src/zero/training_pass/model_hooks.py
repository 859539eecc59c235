"""Forward and backward through a sharded model: units are gathered and released, gradients reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zero.communication.communicator import Communicator
from zero.config.training import Config
from zero.errors import CommunicationError, UsageError
from zero.gradients.group_gradients import GroupGradients
from zero.gradients.reducer import GradientReducer
from zero.integrity import Integrity
from zero.memory.memory_tracer import MemoryTracer
from zero.optimizer.sharded_optimizer import ShardedOptimizer
from zero.sharding.autocast import AutocastWatch
from zero.sharding.exact import computes_in
from zero.sharding.lifetime import ModelRef, weakly
from zero.sharding.phase import Phase
from zero.sharding.sharded_unit import Keep, ShardedUnit
from zero.sharding.tensors import map_tensors
from zero.sharding.uncopied import Uncopied
from zero.tiers.apart import apart
from zero.tiers.stores import Stores
from zero.training_pass.call_order import CallOrder
from zero.training_pass.progress import Progress
from zero.training_pass.schedule import Schedule
from zero.training_pass.under_way import calls_under_way
from zero.training_pass.unit_hooks import UnitHooks

if TYPE_CHECKING:
    from zero.compiled.model import CompiledModel


class ModelHooks(Uncopied):
    """The hooks on a model and its parameters, and the engine's work before, during and after a backward.

    integrity: asked before a forward. tracer: told of units that come and go. reducer: reduces the gradients
    that arrive. compiled: the model's calls through torch.compile; None if not compiled.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Config,
        stores: Stores,
        communicator: Communicator,
        units: Sequence[ShardedUnit],
        integrity: Integrity,
        optimizer: ShardedOptimizer,
        reducer: GradientReducer,
        tracer: MemoryTracer,
    ) -> None:
        self.phase = Phase()
        self._tracer = tracer
        self._model = ModelRef(module)
        self._integrity = integrity
        self._record_streamer = optimizer.record_streamer
        self._communicator = communicator
        self._forwards = 0  # with gradients, since the last backward
        self._config = config
        self._units = units
        self._called = weakref.WeakSet((module,))  # and, from `UnitHooks`, whatever needs a unit
        disk = stores.read_ahead if config.tiers.params == "disk" else None
        self._schedule = Schedule(list(units), config.prefetch, disk)
        device_type = stores.accelerator.device.type
        gathers, rank = not all(u.resident for u in units), communicator.group.rank
        self._watch = AutocastWatch(module, config, device_type, gathers, rank)
        self._order = CallOrder(communicator)
        self._root: Any = None  # the first node of the graph of the backward under way
        self._progress = progress = Progress(device_type, weakly(self._expect), weakly(self._come_to))
        self._hooks = {
            unit: UnitHooks(
                unit,
                self._schedule,
                self.phase,
                progress,
                self._order,
                device_type,
                tracer,
                self._called,
                weakly(self._backward_over),
            )
            for unit in units
        }
        self.reducer = reducer
        for gradients in reducer.all:
            for index, parameter in enumerate(gradients.group.parameters):
                parameter.register_post_accumulate_grad_hook(_receiver(self, gradients, index))
        module.register_forward_pre_hook(self._begin_forward, with_kwargs=True, prepend=True)
        self._issued = 0  # collectives, when the last forward began
        if disk is not None:
            module.register_forward_hook(self._leave_forward, always_call=True)
        if communicator.group.size > 1:
            module.register_forward_hook(self._agree_on_forward)
        self.compiled = None if config.compiling is None else self._compile(stores)

    def watchable(self) -> Iterator[nn.Module]:
        """Yield the modules whose operations can be seen one by one: none of a compiled model."""
        if self.compiled is None:
            yield self._model()
            for unit in self._units:
                yield from unit.hooked_modules

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Wrap autograd's run. last: this is the last micro-batch of an optimizer step.

        After an exception the caller must call `recover`.
        """
        try:
            self.phase.in_backward = self._communicator.in_pass = True
            # A graph's schedule knows only that graph: with another one under way, records come in the step.
            self._record_streamer.expected = last and self._forwards == 1
            self._tracer.mark("backward", "")
            self._forget_progress()  # left by torch.autograd.grad, which may have ended anywhere
            self._forget_interrupted()
            with apart():
                self.reducer.begin_backward(last)
            yield
            self._order.finish()
            if last:
                self._order.settle()
            # Before the last micro-batch, only a disk may have anything to tell.
            with apart():
                self.reducer.finish_backward(agree=last or self._config.tiers.path is not None)
        finally:
            self.phase.in_backward = self._communicator.in_pass = self._record_streamer.expected = False
            if not self._forwards:  # of the whole model: only parts were called, and this was their order
                self._schedule.begin(training=True)
            self._forwards = 0
        self._reset()
        torch.clear_autocast_cache()  # an autocast block that goes on must cast anew: these units are gone
        # Another micro-batch's forward may have come before this backward, with parts that are lent.
        self.release_all(keep=() if last else (Keep.LENT,))

    def run_autograd(self, loss: Tensor) -> None:
        """Run autograd from the loss, in a `backward` block."""
        self._progress.look_at(loss)
        entry = loss.register_hook(self._enter)
        self._root = loss.grad_fn
        try:
            with self._progress.in_one_thread():
                loss.backward()
        finally:
            entry.remove()  # the user may keep the loss
            self._root = None

    def _enter(self, gradient: Tensor) -> None:
        self._progress.enter()

    def _forget_progress(self) -> None:
        self._progress.reset()
        for hooks in self._hooks.values():
            hooks.forget_progress()

    def _expect(self, task: int) -> None:
        if self.phase.in_backward and self._order.task < 0:
            self._order.begin(task, self._root)
        for hooks in self._hooks.values():
            hooks.expect()

    def _come_to(self, task: int, number: int) -> None:
        if task == self._order.task:
            self._order.come_to(number)

    def _reset(self) -> None:
        self._progress.reset()
        for hooks in self._hooks.values():
            hooks.reset()

    def in_use(self, own_calls: int = 0) -> bool:
        """Return whether a forward or a `zero.gathered` block is under way.

        own_calls: how many module calls on the stack are the caller's own, and do not count.
        """
        self._forget_interrupted(own_calls)
        return any(unit.held for unit in self._units)

    def check_not_in_use(self, call: str) -> None:
        """Raise UsageError inside a forward or `zero.gathered`, which would continue with old values."""
        if self.in_use():
            shown = any(unit.held_exact for unit in self._units)
            where = "zero.gathered: leave the block" if shown else "a forward: let it return"
            raise UsageError(f"{call}() was called inside {where} first")

    def _forget_interrupted(self, own_calls: int = 0) -> None:
        """Let go of units still held by a forward that a KeyboardInterrupt ended without running any hook.

        They would otherwise keep the values they have, whatever changes the weights.
        """
        held = any(unit.forwards for unit in self._units)
        if held and calls_under_way(self._called) <= own_calls:
            self._communicator.in_pass = self.phase.in_backward
            for hooks in self._hooks.values():
                hooks.leave_forward()

    def release_all(self, keep: Iterable[Keep] = ()) -> None:
        """Drop whole values, including those of forwards without a backward; see ShardedUnit.forget_calls."""
        for unit in self._units:
            unit.forget_calls(keep)
            unit.release()

    def recover(self) -> None:
        """Drop gradients, gathers and calls under way, after an exception."""
        self._drop_accumulated()
        self._order.clear()
        try:
            self._record_streamer.dropped()
            self.reducer.clear()
            self._reset()
            for unit in self._units:
                unit.abandon()
        except CommunicationError:
            pass  # the original error says more

    def _drop_accumulated(self) -> None:
        """Drop gradients that autograd accumulated but `receive` did not take.

        That happens if a hook before it raises; the next backward would add to them.
        """
        for gradients in self.reducer.all:
            for parameter in gradients.group.parameters:
                parameter.grad = None

    def after_step(self) -> None:
        """Do what follows an optimizer step in compiled training. Collective."""
        if self.compiled is not None:
            self.compiled.after_step()

    def receive(self, gradients: GroupGradients, index: int, parameter: Tensor) -> None:
        """Take a parameter's gradient, once autograd has accumulated it."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:  # None: there is no gradient, or a compiled graph has handed it over
            self._take(gradients, index, gradient)

    def _take(self, gradients: GroupGradients, index: int, gradient: Tensor, more: bool = False) -> None:
        if not self.phase.in_backward:
            raise UsageError(_OUTSIDE)
        self._hooks[gradients.unit].gradient_arrived()
        with apart():
            if self.reducer.receive(gradients, index, gradient, more):
                self._hooks[gradients.unit].gradients_complete()

    def _begin_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        if self.phase.in_graph:
            return None  # this was done before the graph was entered
        if not self.phase.in_backward:
            self._communicator.in_pass = self._config.tiers.params == "disk"
            with apart():
                self._record_streamer.return_all_to_host()  # graphs do this themselves
            self._issued = self._communicator.issued
        return self._prepare(module, args, kwargs, own_calls=1)

    def _leave_forward(self, *_: Any) -> None:
        self._communicator.in_pass = self.phase.in_backward

    def _agree_on_forward(self, *_: Any) -> None:
        """After a forward that no backward follows, raise RankMismatchError if ranks gathered other units.

        After any, raise OffloadError on every rank if one could not read parameters from disk.
        """
        if self.phase.in_backward or self.phase.in_graph:
            return
        gathered = not torch.is_grad_enabled() and self._communicator.issued > self._issued
        if gathered or self._config.tiers.params == "disk":
            with apart():
                self._communicator.agree()

    def _prepare(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], own_calls: int = 0
    ) -> tuple[Any, Any] | None:
        """Prepare a forward, run by hooks or by a graph. own_calls: as in `in_use`."""
        self._integrity.check_present()
        if not self.phase.in_backward:
            self._record_streamer.dropped()  # this forward may need their room
            self._forwards += torch.is_grad_enabled()
            self._watch.look()
        if not (_in_autograd() or self.in_use(own_calls)):
            # What a forward prefetched or kept but never used.
            with apart():
                self.release_all(keep=(Keep.DIFFERENTIATED, Keep.LENT))
            self._forget_progress()
            self._schedule.begin(torch.is_grad_enabled())
            self._integrity.check_refreshed()
            self._tracer.begin()
        dtype = self._config.dtype
        if not self._config.cast_inputs or dtype is None or dtype.itemsize > 2:
            return None
        return map_tensors(lambda t: t.to(dtype) if computes_in(t.dtype) else t, (args, kwargs))  # type: ignore[no-any-return]

    def _backward_over(self, unit: ShardedUnit) -> None:
        if self.phase.in_backward:
            self.reducer.close(unit)

    def _graph_over(self, unit: ShardedUnit) -> None:
        if self.phase.in_backward:
            self.reducer.close_in_graph(unit)

    def _compile(self, stores: Stores) -> CompiledModel:
        from zero.compiled.compile_calls import Callbacks, compile_calls  # imports the compiler, for seconds

        of_group = {gradients.group: gradients for gradients in self.reducer.all}
        take = weakly(self._take)
        callbacks = Callbacks(
            weakly(self._prepare),
            lambda group, index, gradient, more: take(of_group[group], index, gradient, more),
            weakly(self._graph_over),
        )
        module, config, communicator = self._model(), self._config, self._communicator
        return compile_calls(
            module,
            config,
            self._units,
            stores,
            communicator,
            self._record_streamer,
            self.phase,
            self._tracer,
            callbacks,
        )


_OUTSIDE = (
    "gradients of this model's parameters were computed outside engine.backward(loss). If by "
    "loss.backward(): call engine.backward(loss) instead. If by another engine's backward that goes through "
    "this model: freeze it, with model.requires_grad_(False), before the forward that it goes through. If by "
    "torch.autograd.grad: a compiled model cannot tell it apart; remove zero.Config(compile=...)"
)


def _in_autograd() -> bool:
    """Return whether a backward is running, of this engine or another: a forward here recomputes."""
    return bool(torch._C._current_graph_task_id() >= 0)


def _receiver(model_hooks: ModelHooks, gradients: GroupGradients, index: int) -> Callable[[Tensor], None]:
    """Make a hook that calls `model_hooks.receive` and holds only weak references.

    Python's garbage collector does not see into these hooks, so a cycle would never be freed.
    """
    hooks_alive, gradients_alive = weakref.ref(model_hooks), weakref.ref(gradients)

    def receive(parameter: Tensor) -> None:
        owner, place = hooks_alive(), gradients_alive()
        if owner is not None and place is not None:
            owner.receive(place, index, parameter)

    return receive
