"""The engine: forward, backward, step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero import model_state
from zero.access import WHOLE_ATTRIBUTE
from zero.balance import Balancer
from zero.checkpoint.checkpoints import Checkpoints
from zero.checkpoint.engine_state import EngineParts
from zero.checkpoint.load import Loaded, Options
from zero.checkpoint.names import Rename
from zero.communicator import Communicator, Traffic
from zero.compiled.settings import Compile
from zero.config import DTYPES, Config
from zero.errors import CommunicationError, OutOfMemoryError, UsageError
from zero.gradients import GradientPolicy, GradientReducer, GroupGradients
from zero.memory_tracer import MemoryTracer
from zero.optimizer import ShardedOptimizer
from zero.optimizer_state import OptimizerState
from zero.precision import INITIAL_SCALE, LossScale
from zero.pretrained import Request, fill_engine
from zero.schedule import Schedule
from zero.sharded_unit import ShardedUnit
from zero.tensors import map_tensors
from zero.tiers.stores import Stores
from zero.tiers.trace import MemoryReport
from zero.unit_hooks import Phase, UnitHooks
from zero.whole import WholeValues

if TYPE_CHECKING:
    from zero.compiled.explain import Explanation
    from zero.compiled.model import CompiledModel

_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class Engine:
    """Trains a sharded model; made by `zero.initialize`.

    module: the model. optimizer: the user's own object. steps: optimizer steps taken (skipped ones
    included). grad_norm: 0-dim fp32, the global L2 norm before clipping at the last step; None unless
    clip_norm or fp16 asks for it. Reading it as a number waits for the device.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        config: Config,
        stores: Stores,
        communicator: Communicator,
        units: list[ShardedUnit],
        param_group_of: dict[nn.Parameter, int],
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.config = config
        self.accelerator = accelerator = stores.accelerator
        self.steps = 0
        self.grad_norm: Tensor | None = None
        self.units = tuple(units)
        self._stores = stores
        self._communicator = communicator
        self._micro_steps = 0
        self._parked = False  # see offload_states
        self._interrupted = False  # in the middle of an optimizer step or a load
        self._phase = Phase(on_unit=self._trace)
        self._schedule = Schedule(units, config.prefetch)
        trainable = [g for u in units for g in u.groups if g.trainable]
        self._shards = ShardedOptimizer(optimizer, trainable, param_group_of, stores)
        self._loss_scale = _make_loss_scale(config, accelerator.device)
        self._whole = WholeValues(units, communicator)
        self._optimizer_state = OptimizerState(self._whole, self._shards)
        parts = EngineParts(
            module,
            config,
            accelerator,
            communicator,
            self.units,
            self._shards,
            param_group_of,
            self._loss_scale,
        )
        self._checkpoints = Checkpoints(parts)
        device_type = accelerator.device.type
        self._hooks = {
            unit: UnitHooks(unit, self._schedule, self._phase, device_type, self._backward_over)
            for unit in units
        }
        self._reducer = GradientReducer(
            units,
            stores,
            communicator,
            _gradient_policy(config, communicator.group.size),
            lambda unit: self._hooks[unit].gradients_complete(),
        )
        self._tracer = MemoryTracer(accelerator, units, self._reducer, self._shards)
        self._balancer: Balancer | None = None
        if config.offload == "auto":
            self._balancer = Balancer(stores, communicator, self._tracer, self._shards, self._reducer.all)
        for parameter in module.parameters():
            parameter.__dict__[WHOLE_ATTRIBUTE] = self._whole
        for gradients in self._reducer.all:
            for index, parameter in enumerate(gradients.group.parameters):
                parameter.register_post_accumulate_grad_hook(_receiver(self, gradients, index))
        module.register_forward_pre_hook(self._begin_forward, with_kwargs=True, prepend=True)
        self._compiled = None if config.compile is None else self._compile(config.compile)

    # -- training -----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; the same as calling the model itself.

        With offload="auto", where activations find no room and optimizer state can make some, it is repeated,
        on one rank; on several, the OutOfMemoryError says that the step may be repeated.
        """
        if self._balancer is None:
            return self.module(*args, **kwargs)
        before = self.accelerator.rng.get_state()
        try:
            return self.module(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            self._recover()
            self._make_room(error)
            if self.world_size > 1:
                raise _asking_to_repeat("forward") from error
        self.accelerator.rng.set_state(before)
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Run autograd from `loss` (one element) and reduce the gradients.

        The gradient is that of the mean over ranks and over the micro-batches of an optimizer step. If
        anything raises, all gradients since the last optimizer step are dropped and the engine stays
        usable.
        """
        self._check_backward(loss)
        scaled = loss / self.config.gradient_accumulation_steps if self._accumulates else loss
        if self._loss_scale is not None:
            scaled = scaled * self._loss_scale.scale.to(scaled.device)
        self._phase.in_backward = True
        self._trace("")
        try:
            self._reducer.begin_backward(
                last=self._micro_steps + 1 == self.config.gradient_accumulation_steps
            )
            scaled.backward()
            self._reducer.finish_backward()
        except torch.OutOfMemoryError as error:
            self._recover()
            self._make_room(error)
            raise _asking_to_repeat("backward") from error
        except BaseException:
            self._recover()
            raise
        finally:
            self._phase.in_backward = False
        self._micro_steps += 1
        for hooks in self._hooks.values():
            hooks.reset()
        self._release_all()
        self._tracer.mark("backward", "")
        self.accelerator.flush()

    def step(self) -> bool:
        """Update the parameters once the micro-batches of an optimizer step are complete.

        Returns whether this call was an optimizer step; before the last micro-batch it does nothing. With
        fp16 a step whose gradients overflow changes nothing but the loss scale.
        """
        if not self._micro_steps:
            raise UsageError("step() without backward(): call engine.backward(loss) first")
        if not self.is_boundary:
            return False
        self._shards.check_groups()
        scale, skip = self._gradient_factor()
        self._update(scale, skip)
        self._stores.join()
        if self._loss_scale is not None and skip is not None:
            self._loss_scale.update(skip)
        self.zero_grad()
        self._refresh()
        self.steps += 1
        self.accelerator.flush()
        self._tracer.end()
        if self._balancer is not None:
            self._balancer.after_step()
        return True

    def zero_grad(self) -> None:
        """Drop the gradients of all micro-batches since the last optimizer step."""
        self._reducer.clear()
        self._micro_steps = 0

    def explain(self) -> Explanation:
        """What compilation made of the model so far; `str()` of it is for people."""
        if self._compiled is None:
            raise UsageError("explain() is about compiled models: set zero.Config(compile=True)")
        return self._compiled.explain()

    @property
    def is_boundary(self) -> bool:
        """Whether the next step() is an optimizer step."""
        return self._micro_steps == self.config.gradient_accumulation_steps

    @property
    def loss_scale(self) -> Tensor | None:
        """The fp16 loss scale, 0-dim fp32 on the device; None without fp16."""
        return None if self._loss_scale is None else self._loss_scale.scale.clone()

    @property
    def traffic(self) -> Traffic:
        """Collectives issued so far, by kind: counts and bytes. `traffic.clear()` starts again."""
        return self._communicator.traffic

    @property
    def rank(self) -> int:
        return self._communicator.group.rank

    @property
    def world_size(self) -> int:
        return self._communicator.group.size

    def train(self, mode: bool = True) -> Engine:
        """`module.train(mode)`."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """`module.eval()`."""
        return self.train(False)

    # -- whole values (collective: every rank must call these) ------------------------------------------

    def state_dict(self, master: bool = False) -> dict[str, Any]:
        """The whole model in rank 0's host memory, {} on other ranks; loads into the plain model.

        master: the fp32 masters instead of the 16-bit weights.
        """
        return model_state.read(self.module, self._whole, master)

    def load_state_dict(self, state: Mapping[str, Any] | None, strict: bool = True) -> None:
        """Load a whole model from rank 0's `state` (ignored on other ranks) into shards and masters.

        Raises StateError, on every rank and before anything changes, for names or shapes that do not fit.
        """
        model_state.load(self.module, self._whole, state, strict)

    def full_master(self, name: str) -> Tensor:
        """The whole fp32 master of parameter `name`, in its shape, on every rank.

        A frozen parameter has no master: its own value is returned, in fp32.
        """
        _, group, _ = self._whole.locate(name)
        return self._whole.parameter(name, group.widest).float()

    def full_gradient(self, name: str) -> Tensor | None:
        """The whole gradient of `name`, fp32: averaged and unscaled, before clipping.

        Between backward() and step(). None if no rank has one.
        """
        _, group, index = self._whole.locate(name)
        if self._micro_steps and not self.is_boundary and self._reducer.local:
            raise UsageError("with local accumulation gradients are complete at the last micro-batch only")
        have = next((g for g in self._reducer.all if g.group is group), None)
        if have is None or not have.present or index not in have.used:
            return None
        value = self._whole.parameter(name, have.reduced_slice).float()
        factor = self._mean_factor()
        return value if factor is None else value * factor

    def full_optimizer_state(self, name: str) -> dict[str, Tensor]:
        """The whole optimizer state of parameter `name` (for Adam: step, exp_avg, exp_avg_sq), fp32."""
        return self._optimizer_state.of(name)

    def save_checkpoint(
        self,
        path: str | Path,
        state: Mapping[str, Any] | None = None,
        *,
        rank_state: Mapping[str, Any] | None = None,
        keep_last: int | None = None,
        async_: bool = False,
    ) -> None:
        """Write everything that training needs to go on to the directory `path`, e.g. "runs/a/step-100".

        Every rank writes its share; the checkpoint then takes its name in one step, in place of an older
        one of that name, and `latest` beside it points to it.

        state: rank 0's values to get back from load_checkpoint: JSON values, tuples, tensors, and objects
        with state_dict(), such as schedulers. rank_state: the same, each rank's own. keep_last: afterwards
        remove all but this many of the checkpoints in the directory that were saved with keep_last. async_:
        return once the state has been copied, into host memory of its size that is kept for the next time,
        and write it beside training; an error is then logged, and raised by the next save_checkpoint,
        load_checkpoint or wait_for_checkpoint.

        Raises, on every rank, UsageError for what cannot be saved and CheckpointError where writing fails;
        checkpoints that were there stay as they were.
        """
        self._check_complete()
        if self._micro_steps:
            raise UsageError(
                "save_checkpoint between the micro-batches of an optimizer step: their gradients would be "
                "lost; save after engine.step(), or call engine.zero_grad() first"
            )
        self._checkpoints.save(path, self.steps, state or {}, rank_state or {}, keep_last, async_)

    def load_checkpoint(
        self,
        path: str | Path,
        *,
        restore: Mapping[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool = False,
        rename: Rename | None = None,
    ) -> Loaded:
        """Restore what save_checkpoint wrote, at any world size, stage and device.

        path: a checkpoint, or the directory of several, whose `latest` is taken. restore: objects with
        load_state_dict(), by their key in `state`. strict: refuse names that are missing or unexpected.
        weights_only: parameters and buffers alone. rename: a mapping or function from names in the
        checkpoint to the model's, None for those to leave out. Generators of random numbers are restored
        on ranks that saved them.

        Raises, on every rank: CheckpointError if there is no complete checkpoint, StateError with all names
        that do not fit, both before anything changes; CorruptCheckpointError where bytes are damaged. The
        engine then refuses to go on until a whole checkpoint has been loaded.
        """
        options, before = Options(restore or {}, strict, weights_only, rename), self._interrupted
        loaded = self._checkpoints.load(path, options, self._begin_load)
        if not weights_only:
            self.steps = loaded.steps
        self._interrupted = before and (
            weights_only or not strict
        )  # what it left half done may still be there
        return loaded

    def load_pretrained(self, path: str | Path, *, strict: bool = True, rename: Rename | None = None) -> None:
        """Fill parameters and buffers from safetensors, each rank reading its slices; collective.

        The arguments are those of `zero.load_pretrained`, which does this before `zero.initialize`. The
        optimizer's state and the step count stay as they are. Raises, on every rank, what that does, before
        anything changes; after an error in reading the engine refuses to go on until a checkpoint is loaded.
        """
        before = self._interrupted
        request = Request(Path(path), strict, rename, self._checkpoints.storage)
        fill_engine(self.module, self._whole, request, self._begin_load)
        self._interrupted = before

    def wait_for_checkpoint(self) -> None:
        """Return once a save in the background is complete; raises its error."""
        self._checkpoints.wait()

    # -- memory (collective) -----------------------------------------------------------------------------

    def offload_states(self) -> None:
        """Move parameters and optimizer state to host memory, and give the device's memory to others.

        For a while in which something else runs on the device: generation, evaluation. Call
        `reload_states()` before training goes on. Between optimizer steps only.
        """
        if self._micro_steps:
            raise UsageError("offload_states between backward() and step(): there are gradients; step first")
        self._check_complete()
        self._release_all()
        self._whole.begin_write()
        for unit in self.units:
            for group in unit.groups:
                if group.trainable:
                    self._shards.move(group, "host")
            unit.park()
        self._parked = True
        self.accelerator.streams.synchronize()
        self.accelerator.memory.trim()

    def reload_states(self) -> None:
        """Bring back what `offload_states` moved, bit for bit. Does nothing where nothing is away."""
        handles = [handle for unit in self.units if self._parked for handle in unit.unpark()]
        for handle in handles:
            handle.wait()
        for unit in self.units:
            for group in unit.groups:
                if group.trainable:
                    self._shards.move(group, group.placement.optimizer)
        self._parked = False

    def trace_memory(self, steps: int = 1) -> None:
        """Follow the device's memory through the next optimizer steps, for `memory_report`.

        The device's peak statistics start again many times meanwhile.
        """
        if steps < 1:
            raise UsageError(f"trace_memory(steps={steps}): at least one step is needed")
        self._tracer.steps = max(self._tracer.steps, steps)  # offload="auto" may be measuring already

    def memory_report(self) -> MemoryReport:
        """The last optimizer step that was traced: a timeline, its peaks by phase, a picture as HTML."""
        if self._tracer.report is None:
            raise UsageError("no step was traced: call engine.trace_memory() and train a step")
        return self._tracer.report

    # -- inside -----------------------------------------------------------------------------------------

    def _trace(self, unit: str) -> None:
        self._tracer.mark("backward" if self._phase.in_backward else "forward", unit)

    def _make_room(self, error: torch.OutOfMemoryError) -> None:
        """Move state off the device, as much as there is; raise where there is none."""
        if not self._stores.relieve(self.accelerator.memory.stats().capacity):
            raise error

    @property
    def _accumulates(self) -> bool:
        return self.config.gradient_accumulation_steps > 1

    def _begin_load(self) -> None:
        if any(unit.holds for unit in self.units):
            raise UsageError("load_checkpoint inside zero.gathered: leave the block first")
        self.zero_grad()
        self._release_all()
        self._interrupted = True
        self._whole.begin_write()

    def _begin_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        if self._phase.in_graph:
            return None  # done before the graph was entered
        if self._parked:
            raise UsageError("the model's state is on the host: call engine.reload_states() first")
        if not self._phase.in_backward and not any(u.holds for u in self.units):
            self._release_all()  # what an earlier forward prefetched or kept, and never used
            self._schedule.begin(torch.is_grad_enabled())
            self._tracer.begin()
        dtype = self.config.dtype
        if not self.config.cast_inputs or dtype is None or dtype.itemsize > 2:
            return None
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))  # type: ignore[no-any-return]

    def _receive(self, gradients: GroupGradients, index: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:  # None: there is none, or a compiled graph has handed it over
            self._take(gradients, index, gradient)

    def _take(self, gradients: GroupGradients, index: int, gradient: Tensor) -> None:
        if not self._phase.in_backward:
            raise UsageError("loss.backward() was called directly: call engine.backward(loss) instead")
        self._reducer.receive(gradients, index, gradient)

    def _compile(self, settings: Compile) -> CompiledModel:
        from zero.compiled.model import CompiledModel  # imports the compiler: seconds, for who wants it
        from zero.compiled.runtime import Runtime

        of_group = {gradients.group: gradients for gradients in self._reducer.all}
        runtime = Runtime(
            self.units,
            lambda group, index, gradient: self._take(of_group[group], index, gradient),
            self._backward_over,
            self._phase.mark,
        )
        begin = self._begin_forward
        return CompiledModel(self.module, self.units, runtime, settings, self._phase, begin)

    def _update(self, scale: Tensor | None, skip: Tensor | None) -> None:
        """Step the optimizer. Interrupted half-way it cannot be repeated: some parameters are updated."""
        self._whole.begin_write()
        try:
            self._shards.step(self._reducer.all, scale, skip)
        except BaseException:
            self._interrupted = True
            self.zero_grad()
            raise

    def _backward_over(self, unit: ShardedUnit) -> None:
        if self._phase.in_backward:
            self._reducer.close(unit)

    def _check_backward(self, loss: Tensor) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"backward() needs a tensor of one element, the loss; got {what}")
        if not loss.requires_grad:
            raise UsageError("backward(): the loss does not depend on any parameter that requires a gradient")
        self._check_complete()
        if self.is_boundary:
            raise UsageError(
                f"backward() was called more than gradient_accumulation_steps="
                f"{self.config.gradient_accumulation_steps} times: call engine.step() first"
            )

    def _check_complete(self) -> None:
        if self._interrupted:
            raise UsageError(
                "an optimizer step or a load was interrupted and some values are new, others old: "
                "restore a checkpoint with engine.load_checkpoint, or build model and engine anew"
            )

    def _gradient_factor(self) -> tuple[Tensor | None, Tensor | None]:
        """What gradients are multiplied by (None: 1), and whether to skip the step; nothing waits."""
        factor = self._mean_factor()
        if self._loss_scale is None and self.config.clip_norm is None:
            return factor, None
        norm, overflow = self._global_norm(factor)
        self.grad_norm = norm
        if self.config.clip_norm is not None:
            clip = (self.config.clip_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0)
            factor = clip if factor is None else factor * clip
        return factor, overflow if self._loss_scale is not None else None

    def _mean_factor(self) -> Tensor | None:
        """1 / (world size × loss scale)."""
        size, device = self.world_size, self.accelerator.device
        if self._loss_scale is not None:
            return 1.0 / (self._loss_scale.scale * size)
        return None if size == 1 else torch.full((), 1.0 / size, dtype=torch.float32, device=device)

    def _global_norm(self, factor: Tensor | None) -> tuple[Tensor, Tensor]:
        result = self._reducer.norm_and_nonfinite()
        if self.config.stage > 0 and self.world_size > 1:
            self._communicator.all_reduce("gradient norm", result).wait()
        norm = result[0].sqrt()
        return norm if factor is None else norm * factor, (result[1] > 0).float()

    def _refresh(self) -> None:
        """Spread updated shards where whole parameters are kept."""
        for handle in [h for unit in self.units for h in unit.refresh()]:
            handle.wait()

    def _release_all(self) -> None:
        for unit in self.units:
            unit.calls_in_backward.clear()
            unit.release()

    def _recover(self) -> None:
        """After an exception: drop gradients, gathers and calls under way."""
        try:
            self.zero_grad()
            for unit in self.units:
                self._hooks[unit].reset()
                unit.abandon()
        except CommunicationError:
            pass  # the original error says more


def _asking_to_repeat(what: str) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"no room for what {what} computes. All optimizer state has moved to the host now: repeat the "
        "micro-batches of this optimizer step, on all ranks"
    )


def _receiver(engine: Engine, gradients: GroupGradients, index: int) -> Callable[[Tensor], None]:
    """Holds neither: Python's collector does not see into these hooks, and a cycle would never be freed."""
    engine_alive, gradients_alive = weakref.ref(engine), weakref.ref(gradients)

    def receive(parameter: Tensor) -> None:
        owner, place = engine_alive(), gradients_alive()
        if owner is not None and place is not None:
            owner._receive(place, index, parameter)

    return receive


def _make_loss_scale(config: Config, device: torch.device) -> LossScale | None:
    if config.precision != "fp16":
        return None
    fixed = not isinstance(config.loss_scale, str)
    initial = INITIAL_SCALE if isinstance(config.loss_scale, str) else float(config.loss_scale)
    return LossScale(device, initial, config.loss_scale_window, fixed)


def _gradient_policy(config: Config, world_size: int) -> GradientPolicy:
    return GradientPolicy(
        steps=config.gradient_accumulation_steps,
        local=config.accumulate == "local" or config.stage == 1 or world_size == 1,
        reduce_dtype=DTYPES[config.reduce_dtype] if config.reduce_dtype and world_size > 1 else None,
    )
