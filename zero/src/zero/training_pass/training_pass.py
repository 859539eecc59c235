"""A pass of training: forwards, the backward that goes through them, and what both leave for the step.

`TrainingPass` is the one place that says where training is. Hooks and compiled graphs report to it what
happens, and it tells what is below it: reducer, gathers, record streamer, communicator, tracer.

A backward is `begin`, autograd's run, `end`; or `abandon`, from wherever an exception has come. Where the
program runs autograd itself, as `loss.backward()` does, a backward begins when autograd enters a graph of the
model's that gives gradients to its parameters, and ends in a callback of autograd's. Autograd calls nobody
after an exception: that is found where the program next comes here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle, unserializable_hook

from zero.communication.communicator import Communicator
from zero.config.training import Config, dtype_named
from zero.errors import CommunicationError, UsageError
from zero.gradients.factor import GradientFactor
from zero.gradients.group_gradients import GroupGradients
from zero.gradients.reducer import GradientReducer
from zero.optimizer.record_streamer import RecordStreamer
from zero.sharding.alterations import changed_since
from zero.sharding.autocast import AutocastWarnings
from zero.sharding.exact import computes_in
from zero.sharding.flat_group import FlatGroup
from zero.sharding.lifetime import Uncopied, weakly
from zero.sharding.sharded_unit import Keep, ShardedUnit
from zero.sharding.tensors import map_tensors
from zero.tiers.apart import apart
from zero.tiers.tier import wanted
from zero.training_pass.call import Call, CallEdges, number_of
from zero.training_pass.call_order import CallOrder
from zero.training_pass.progress import Progress
from zero.training_pass.schedule import Schedule
from zero.training_pass.under_way import calls_under_way, runs_under_way
from zero.training_pass.unit_calls import UnitCalls
from zero.warning import warn

if TYPE_CHECKING:
    from zero.memory.memory_tracer import MemoryTracer
    from zero.optimizer.integrity import Integrity
    from zero.whole.held_gradients import HeldGradients


@dataclass(eq=False, repr=False, kw_only=True)
class TrainingPass(Uncopied):
    """Where training is, and what happens there.

    backwards: how many there have been since the last step. has_gradients: whether there are gradients, which
    may have been stepped already. summed: whether the last backward has left sums over all ranks, of which
    all know, or the one under way will. in_backward: between the beginning and the end of one. in_graph:
    inside a compiled forward of the whole model, which does its own gathers. schedule: the order in which
    units are needed. order: of the calls of units. calls: of each unit, by its index. called: modules whose
    calls need a unit. failed_by_itself(): told of a backward that autograd began and that has failed.
    """

    module: InitVar[nn.Module]
    config: Config
    device_type: str
    communicator: Communicator
    units: Sequence[ShardedUnit]
    schedule: Schedule
    integrity: Integrity
    streamed_state: RecordStreamer
    reducer: GradientReducer
    factor: GradientFactor
    held_gradients: HeldGradients
    tracer: MemoryTracer

    def __post_init__(self, module: nn.Module) -> None:
        self.backwards = 0
        self.has_gradients = False
        self.in_backward = False
        self.in_graph = False
        self.order = CallOrder(self.communicator, self.units)
        self.calls = [UnitCalls(unit) for unit in self.units]
        self.called = weakref.WeakSet((module,))
        self.failed_by_itself: Callable[[], Any] = lambda: None
        self.handles: list[RemovableHandle] = []  # of the hooks that report to it
        self.sums_ranks = True  # those that begin now; False in `no_sync`
        self._steps = self.config.gradient_accumulation_steps
        self.summed = False
        self._by_itself = False  # the backward under way was begun by autograd
        self._retains = False  # its graph, for another one
        self._depth = 0  # how many runs of autograd there were then, one within the other
        self._forwards = 0  # with gradients, since the last backward
        self._issued = 0  # collectives, when the last forward began
        self._on_disk = wanted(self.config.offload, "params").stored
        self._gradients = {each.group: each for each in self.reducer.all}
        self._observation = self.communicator.observation
        gathers, rank = not all(u.resident for u in self.units), self.communicator.group.rank
        self._autocast = AutocastWarnings(module, self.config, self.device_type, gathers, rank)
        self._progress = Progress(self.device_type)
        self._entered = -1  # the newest of autograd's tasks so far
        self._entering = RLock()  # autograd may have a thread for each device
        self._leaves_graph = False  # of the last forward of the whole model
        self._without_graph = False  # of a unit's forward, inside of one that left a graph
        self._self = weakref.ref(self)

    def unhook(self) -> None:
        """Have nothing reported any more: another pass takes its place."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    # -- forward --------------------------------------------------------------------------------------

    def begin_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """A forward of the whole model begins; return its inputs, or None for those that were given."""
        if self.in_graph:
            return None  # this was done before the graph was entered
        if getattr(DistributedDataParallel._active_ddp_module, "module", None) is module:
            raise UsageError(_WRAPPED)
        if not self.in_backward:
            self.communicator.in_pass = self._on_disk
            self._leaves_graph = torch.is_grad_enabled()
            with apart():
                self.streamed_state.return_all_to_host()  # graphs do this themselves
            self._issued = self.communicator.issued
        return self.prepare_forward(args, kwargs, known_calls=1)

    def prepare_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], known_calls: int = 0
    ) -> tuple[Any, Any] | None:
        """Prepare a forward, run by hooks or by a graph; see `begin_forward`. known_calls: as in `in_use`."""
        self.notice_failure()
        self.integrity.check_present()
        if not self.in_backward:
            self.streamed_state.dropped()  # this forward may need their room
            self._forwards += torch.is_grad_enabled()
            self._autocast.begin_forward()
        # In autograd's run, of this engine or another, a forward recomputes.
        if torch._C._current_graph_task_id() < 0 and not self.in_use(known_calls):
            # What a forward prefetched or kept but never used.
            with apart():
                self.release_all(keep=(Keep.DIFFERENTIATED, Keep.PART_CALLED))
            self._forget_progress()
            self.schedule.begin(torch.is_grad_enabled())
            self.integrity.check_refreshed()
            self.tracer.begin()
            self._observation.phase("forward" if torch.is_grad_enabled() else "evaluation")
        dtype = dtype_named(self.config.precision)
        if not self.config.cast_inputs or dtype is None or dtype.itemsize > 2:
            return None
        return map_tensors(lambda t: t.to(dtype) if computes_in(t.dtype) else t, (args, kwargs))  # type: ignore[no-any-return]

    def end_forward(self, *_: Any) -> None:
        """A forward of the whole model is over, or has failed."""
        self.communicator.in_pass = self.in_backward

    def agree_on_forward(self, *_: Any) -> None:
        """After a forward that no backward follows, raise RankMismatchError if ranks gathered other units.

        After any, raise OffloadError on every rank if one could not read parameters from disk.
        """
        if self.in_backward or self.in_graph:
            return
        gathered = not torch.is_grad_enabled() and self.communicator.issued > self._issued
        if gathered or self._on_disk:
            with apart():
                self.communicator.agree()

    # -- backward -------------------------------------------------------------------------------------

    @property
    def step_is_due(self) -> bool:
        """Whether the micro-batches of an optimizer step are complete."""
        self.notice_failure()
        return self.has_gradients if self._steps is None else self.backwards == self._steps

    @property
    def counts(self) -> bool:
        """Whether the settings say how many backwards an optimizer step has."""
        return self._steps is not None

    def begin(self) -> None:
        """A backward begins."""
        self.summed = self.sums_ranks if self._steps is None else self.backwards + 1 == self._steps
        if self._steps is None and self.has_gradients:
            self.held_gradients.resume()
        self._set_in_backward(True)
        self.tracer.mark("backward", "")
        self._observation.phase("backward")
        self._forget_progress()  # left by torch.autograd.grad, which may have ended anywhere
        self._forget_interrupted()
        with apart():
            self.reducer.begin_backward(self.summed)

    def run(self, loss: Tensor) -> None:
        """Run autograd from the loss, between `begin` and `end`."""
        self._progress.look_at(loss)
        entry = loss.register_hook(self._begin_run)
        try:
            with self._progress.in_one_thread():
                loss.backward()
        finally:
            entry.remove()  # the user may keep the loss

    def end(self) -> None:
        """Autograd has run all nodes: end what is under way, and reduce what is left."""
        with torch.no_grad():  # as in the backward
            while (event := self.order.pop_past(-1)) is not None:
                (self.begin_call if event.over else self._end_call)(event.call)
        self._end_differentiated()
        self.order.end()
        if self.summed:
            self.order.settle()
        # Before the last micro-batch, only a disk may have anything to tell.
        with apart():
            self.reducer.finish_backward(agree=self.summed or self.config.offload.path is not None)
        self._leave_backward()
        self._reset()
        torch.clear_autocast_cache()  # an autocast block that goes on must cast anew: these units are gone
        # Another micro-batch's forward may have come before this backward, with parts that were called.
        over = self.summed and self._steps is not None
        self.release_all(keep=() if over else (Keep.DIFFERENTIATED, Keep.PART_CALLED))
        self.backwards += 1
        self.has_gradients = True
        if self.summed:
            self.held_gradients.show()
        self.tracer.end_backward()
        self._observation.phase("outside")

    def _end_differentiated(self) -> None:
        """Units whose backward is part of a graph need not stay for it, unless it is retained, or is another
        than has just been gone through. The same on all ranks, as `order` is."""
        if not self._retains:
            waiting = {call.index for call in self.order.left_out() if call.differentiated}
            for unit in self.units:
                if unit.index not in waiting:
                    unit.kept.discard(Keep.DIFFERENTIATED)

    def abandon(self) -> None:
        """Drop gradients, gathers and calls under way, after an exception in a forward or backward."""
        self.tracer.drop()
        self.held_gradients.hide()
        self.backwards = 0
        self.has_gradients = False
        if self.in_backward:
            self._leave_backward()
        self._by_itself = self._retains = False
        for gradients in self.reducer.all:  # what autograd has accumulated, and a hook has not let come here
            for parameter in gradients.group.parameters:
                parameter.grad = None
        self.order.clear()
        try:
            self.streamed_state.dropped()
            self.reducer.clear()
            self._reset()
            for unit in self.units:
                unit.abandon()
        except CommunicationError:
            pass  # the original error says more

    def notice_failure(self) -> None:
        """Abandon a backward that was begun by autograd and has failed, of which autograd tells nobody."""
        if self._by_itself and runs_under_way() < self._depth:
            self._abandon_own()

    def _abandon_own(self) -> None:
        self.abandon()
        self.failed_by_itself()

    def gradients_aside(self) -> AbstractContextManager[None]:
        """Wrap a call that may be compiled, which has no use for what stands for gradients."""
        return nullcontext() if self.in_backward else self.held_gradients.aside()

    def zero_grad(self) -> None:
        """Drop the gradients of a step that will not be made."""
        self.notice_failure()
        if self.backwards:
            self.tracer.drop()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop what the backwards since the last step have left."""
        self.held_gradients.hide()
        self.streamed_state.dropped()
        self.reducer.clear()
        self.backwards = 0
        self.has_gradients = False

    def stepped(self) -> None:
        """An optimizer has stepped with the gradients, which stay until they are dropped."""
        self.backwards = 0

    def _leave_backward(self) -> None:
        self._set_in_backward(False)
        if not self._forwards:  # of the whole model: only parts were called, and this was their order
            self.schedule.begin(training=True)
        self._forwards = 0

    def _set_in_backward(self, in_backward: bool) -> None:
        self.in_backward = self.communicator.in_pass = in_backward
        # A graph's schedule knows only that graph: with another one under way, records come in the step.
        self.streamed_state.expected = in_backward and self.summed and self._forwards == 1

    # -- on autograd's way ------------------------------------------------------------------------------

    def follow(self, tensor: Tensor, edges: CallEdges | None = None) -> None:
        """Be told when a tensor's gradient is ready, before its producer's backward.

        edges: of the call that has made it, whose backward then begins; of several, that of the last one
        given first. A tensor that has since been changed in place has another producer.
        """
        self._progress.look_at(tensor)
        assert tensor.grad_fn is not None
        known: Any = tensor.grad_fn.metadata  # of the node: a dict, which goes with it
        key = (self._self, tensor.output_nr)
        calls = known.get(key)
        if calls is None:
            calls = known[key] = []
            tensor.register_hook(unserializable_hook(partial(_come, self._self, number_of(tensor), calls)))
        if edges is not None:
            calls.insert(0, edges)

    def come_to(self, number: int) -> None:
        """Autograd is about to run a node of this number: end the calls that are newer."""
        task = self.enter()
        while (call := self._progress.pop_past(task, number)) is not None:
            self._end_call(call)
        if task == self.order.task:
            while (event := self.order.pop_past(number)) is not None:
                (self.begin_call if event.over else self._end_call)(event.call)

    def begin_call(self, call: Call) -> None:
        """Gather the unit: a gradient has reached an output of the call, on this rank or another."""
        calls = self.calls[call.index]
        unit = calls.unit
        if not self.order.is_current(call):
            raise changed_since()
        if call not in calls.ahead:
            self._expect(call)
        call.taken = True
        unit.computed_in = call.fmt
        if call not in unit.calls_in_backward:
            unit.calls_in_backward.add(call)
            if torch.is_grad_enabled():  # create_graph=True: this backward's own backward needs it again
                unit.kept.add(Keep.DIFFERENTIATED)
                call.differentiated = True
            with apart():
                unit.gather(call.fmt)
                self.schedule.follow(unit, call.fmt)
                self.mark(unit)

    def receive(self, gradients: GroupGradients, index: int, gradient: Tensor, more: bool = False) -> None:
        """Take a parameter's gradient. more: another compiled graph has one to be added to it."""
        if not self.in_backward:
            self.enter()
            if not self.in_backward:
                raise UsageError(_OUTSIDE)
        task = torch._C._current_graph_task_id()
        if task != self.order.task:
            self.calls[gradients.unit.index].gradient_arrived(task)
        with apart():
            if gradients.add(index, gradient, more) and self.reducer.completes_unit(gradients):
                self.calls[gradients.unit.index].gradients_complete()

    def receive_from_graph(self, group: FlatGroup, index: int, gradient: Tensor, more: bool) -> None:
        """Take a parameter's gradient from a compiled graph."""
        if group not in self._gradients:
            self.integrity.check_trainable()  # which raises: there is no optimizer
        self.receive(self._gradients[group], index, gradient, more)

    def close_in_graph(self, unit: ShardedUnit) -> None:
        """A compiled graph has no further gradient of the unit."""
        if self.in_backward:
            self.reducer.close_in_graph(unit)

    def mark(self, unit: ShardedUnit) -> None:
        """A unit comes or goes."""
        self.tracer.mark("backward" if self.in_backward else "forward", unit.name)

    def _begin_run(self, gradient: Tensor) -> None:
        self.enter()

    def enter(self) -> int:
        """Autograd runs: if it has just entered a graph, learn which calls are to come. Returns the task."""
        task = torch._C._current_graph_task_id()
        if task > self._entered:
            with self._entering:
                if task > self._entered:
                    if self._by_itself and runs_under_way() <= self._depth:  # the run that began it is over
                        self._abandon_own()
                    if self._steps is None and not self.in_backward and self._gives_gradients():
                        self._begin_by_itself()
                    self._expect_calls(task)
                    self._entered = task
        return task

    def _gives_gradients(self) -> bool:
        """Return whether autograd's run gives gradients to parameters; torch.autograd.grad does not, nor do
        torch.func's transforms. It may also give them in runs inside it, of what a forward has left for
        later."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        finding = torch.inference_mode(False)  # in which parameters have no nodes
        with torch._C.DisableTorchFunctionSubclass(), finding:
            trainable = (group for unit in self.units for group in unit.groups if group.trainable)
            parameters = [p for group in trainable for p in group.parameters if p.requires_grad]
            nodes = (get_gradient_edge(parameter).node for parameter in parameters)
            try:
                if any(map(torch._C._will_engine_execute_node, nodes)) or any(
                    edges.gives_gradients() for calls in self.calls for edges in calls.in_graphs
                ):
                    return True
                return bool(parameters) and self._without_graph and _recomputes()
            except RuntimeError:  # torch.autograd.grad with respect to a parameter
                return False

    def begin_without_graph(self) -> None:
        """A unit's forward begins that leaves no graph: where the whole model's leaves one, as in reentrant
        checkpointing, this part of it is made inside the backward."""
        self._without_graph |= self._leaves_graph

    def _begin_by_itself(self) -> None:
        self.integrity.check_trainable()
        self.factor.begin_backward(by_engine=False, more=self.has_gradients)
        if torch.is_grad_enabled():
            warn(_NO_GRAPH, rank=self.communicator.group.rank)
        self._retains = torch._C._autograd._get_current_graph_task_keep_graph()
        self._by_itself, self._depth = True, runs_under_way()
        self.begin()
        torch.autograd.Variable._execution_engine.queue_callback(weakly(self._end_by_itself))

    def _end_by_itself(self) -> None:
        try:
            self.end()
            self._by_itself = self._retains = False
        except BaseException:
            self.abandon()
            raise

    def _expect_calls(self, task: int) -> None:
        if self.in_backward and self.order.task < 0:
            for call in self.order.begin(task, torch._C._current_autograd_node()):
                self.calls[call.index].ahead.add(call)
        for calls in self.calls:
            for call in calls.in_running_graph():
                self._expect(call)

    def _expect(self, call: Call) -> None:
        call.taken = True
        self.calls[call.index].ahead.add(call)
        self._progress.expect(call)

    def _end_call(self, call: Call) -> None:
        """Release the unit: autograd has come to a node older than the call."""
        calls = self.calls[call.index]
        unit = calls.unit
        began = call in unit.calls_in_backward
        calls.ahead.discard(call)
        calls.over.append(call)
        unit.calls_in_backward.discard(call)
        with apart():
            self.mark(unit)
            if self.in_backward and not (calls.open_ended or any(map(self.order.takes, calls.ahead))):
                self.reducer.close(self.reducer.of_unit(unit))
            if began:
                unit.release()

    # -- between ------------------------------------------------------------------------------------------

    def in_use(self, known_calls: int = 0) -> bool:
        """Return whether a forward or a `zero.gathered` block is under way.

        known_calls: how many module calls on the stack are the caller's own, and do not count.
        """
        self.notice_failure()
        self._forget_interrupted(known_calls)
        return any(unit.held for unit in self.units)

    def check_not_in_use(self, call: str) -> None:
        """Raise UsageError inside a forward or `zero.gathered`, which would continue with old values."""
        if self.in_use():
            shown = any(unit.held_exact for unit in self.units)
            where = "zero.gathered: leave the block" if shown else "a forward: let it return"
            raise UsageError(f"{call}() was called inside {where} first")

    def release_all(self, keep: Iterable[Keep] = ()) -> None:
        """Drop whole values, including those of forwards without a backward; see ShardedUnit.forget_calls."""
        for unit in self.units:
            unit.forget_calls(keep)
            unit.release()

    def _forget_interrupted(self, known_calls: int = 0) -> None:
        """Let go of units still held by a forward that a KeyboardInterrupt ended without running any hook.

        They would otherwise keep the values they have, whatever changes the weights.
        """
        held = any(unit.forwards for unit in self.units)
        if held and calls_under_way(self.called) <= known_calls:
            self.communicator.in_pass = self.in_backward
            for calls in self.calls:
                calls.leave_forward()

    def _forget_progress(self) -> None:
        self._progress.reset()
        for calls in self.calls:
            calls.forget_progress()

    def _reset(self) -> None:
        self._entered = -1  # the backward may have been inside another, which comes to the model later
        self._progress.reset()
        for calls in self.calls:
            calls.reset()


def _come(
    training_pass: weakref.ref[TrainingPass], number: int, begins: Sequence[CallEdges], gradient: Any
) -> None:
    """The gradient of a tensor is ready, whose producer has this number."""
    alive = training_pass()
    if alive is None:
        if begins:
            raise UsageError(_GONE)
        return
    reached = -1
    for edges in tuple(begins):
        reached = max(number, edges.begins_at)
        alive.come_to(reached)
        alive.begin_call(edges.call)
    if reached != number:
        alive.come_to(number)


def _recomputes() -> bool:
    """Return whether autograd's run goes on from the node that it has come to, and allows reentrant
    checkpointing. Where it goes no further, it has not looked at the latter."""
    after = (node for node, _ in torch._C._current_autograd_node().next_functions if node is not None)
    goes_on = any(map(torch._C._will_engine_execute_node, after))
    return goes_on and bool(torch.autograd._is_checkpoint_valid())


_WRAPPED = (
    "the model was wrapped in DistributedDataParallel after zero.initialize, whose reductions would take the "
    "gradients from the engine: call the model itself, which the engine has made data parallel"
)
_GONE = "the model and its engine no longer exist: keep them until the backward"
_NO_GRAPH = (
    "loss.backward(create_graph=True): the `.grad` of this model's parameters has no graph, so nothing can "
    "be differentiated through it. Gradients of other tensors have one; for a penalty on them, "
    "torch.autograd.grad(..., create_graph=True) does the same without this warning"
)
_OUTSIDE = (
    "gradients of this model's parameters were computed outside engine.backward(loss). If by "
    "loss.backward(): call engine.backward(loss) instead, or leave gradient_accumulation_steps out of "
    "zero.Config. If by another engine's backward that goes through "
    "this model: freeze it, with model.requires_grad_(False), before the forward that it goes through. If by "
    "torch.autograd.grad: a compiled model cannot tell it apart; remove zero.Config(compile=...)"
)
