"""The engine: forward, backward, step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from zero.checkpoint.checkpoints import Checkpoints
from zero.checkpoint.load import Loaded, LoadOptions
from zero.communication.job import record_flight
from zero.communication.ledger import Traffic
from zero.config.paths import as_path
from zero.errors import UsageError
from zero.files.names import Rename
from zero.memory.memory_report import MemoryReport
from zero.memory.placement_policy import asking_to_repeat
from zero.migration_hints import explained, missing, no_tuple
from zero.observe.flops import ATTENTION
from zero.observe.observation import Facts, Observing
from zero.observe.observer import Observer, Run
from zero.observe.profiler import Profiler
from zero.pretrained import Request, fill_engine
from zero.sharding.distributed import as_distributed
from zero.sharding.lifetime import weakly
from zero.sharding.state_entries import Selection
from zero.tiers.values import lasting
from zero.training_pass.boundary import Boundary
from zero.whole import model_state
from zero.whole.optimizer_state import OptimizerState
from zero.whole.parameter_statistics import ParameterStatistics, measure

if TYPE_CHECKING:
    from zero.compiled.explain import Explanation


class Engine:
    """Trains a sharded model; made by `zero.initialize`.

    module: the model. optimizer: the user's own object; where there are several, one object that has the
    param_groups of all of them.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        boundary: Boundary,
        checkpoints: Checkpoints,
        attach: Callable[..., None],
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.config = boundary.training_pass.config
        self.accelerator = boundary.stores.accelerator
        self.units = tuple(boundary.training_pass.units)
        self._boundary = boundary
        self._communicator = boundary.communicator
        self._integrity = boundary.integrity
        self._pass = boundary.training_pass
        self._compiled = boundary.compiled
        self._reducer = boundary.reducer
        self._factor = boundary.training_pass.factor
        self._held_gradients = boundary.held_gradients
        self._loss_scale = boundary.loss_scale
        self._placement = boundary.placement
        self._full_parameters = boundary.full_parameters
        self._tracer = boundary.tracer
        self._state_offload = boundary.integrity.state_offload
        self._checkpoints = checkpoints
        self._attach = attach

    # -- training -----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward. Calling the model itself differs only when memory runs out.

        With offload="auto", an operation that runs out of memory in a forward larger than any before is
        repeated if moving optimizer state off the device makes room. Any other forward, and a compiled one,
        is repeated as a whole on a single rank; on several ranks, the OutOfMemoryError says what to do.
        Gradients of earlier micro-batches are kept unless that error says otherwise.
        """
        return self._placement.forward(self.module, args, kwargs, self._pass.abandon)

    def __repr__(self) -> str:
        settings = ", ".join(f"{k}={getattr(self.config, k)!r}" for k in sorted(self.config.model_fields_set))
        return (
            f"<zero.Engine of {type(self.module).__name__} on {self.accelerator.device}, rank {self.rank} of "
            f"{self.world_size}, after {self.steps} steps: Config({settings})>"
        )

    def __getitem__(self, index: object) -> NoReturn:  # unpacking comes here; an engine is not iterable
        raise no_tuple("Engine")

    def __getattr__(self, name: str) -> Any:
        raise missing(name, self.__dict__.get("module"))  # called for what is not there only

    @explained
    def backward(self, loss: Tensor) -> None:
        """Run autograd from `loss` (one element) and reduce the gradients.

        Gradients are of the mean loss over all ranks and all micro-batches of the optimizer step. If anything
        raises, all gradients since the last optimizer step are dropped and the engine stays usable.
        """
        self._integrity.check_backward(loss)
        self._pass.notice_failure()
        if self.is_boundary and self.config.gradient_accumulation_steps is not None:
            raise UsageError(
                f"backward() was called more than gradient_accumulation_steps="
                f"{self.config.gradient_accumulation_steps} times: call engine.step() first, or "
                "engine.zero_grad() to drop these gradients"
            )
        self._factor.begin_backward(by_engine=True, more=self._pass.has_gradients)
        try:
            self._pass.begin()
            with self._placement.repeating():
                self._pass.run(self._factor.scaled(loss))
            self._pass.end()
            self.accelerator.flush()
        except torch.OutOfMemoryError as error:
            self._pass.abandon()
            self._placement.make_room(error)
            raise asking_to_repeat("backward") from error
        except RuntimeError as error:
            self._pass.abandon()
            if "storage of size 0" in str(error):
                raise UsageError(_ANOTHER_WAY) from error
            raise
        except BaseException:
            self._pass.abandon()
            raise

    @explained
    def step(self) -> bool:
        """Update the parameters once the micro-batches of an optimizer step are complete.

        Returns whether this call was an optimizer step; before the last micro-batch it does nothing. With
        a loss scale, a step whose gradients overflow changes nothing but the scale; after 20 of them in a row
        rank 0 warns, and after every 100 GradientOverflowError is raised, on every rank. Inside
        `zero.gathered` it raises UsageError, and may be called again after the block.

        The first step raises StateError, on every rank, if the optimizer has made state that no checkpoint
        can hold. The step is then complete: a program that catches the error may train on, without saving.
        """
        self._pass.notice_failure()
        if not self._pass.backwards:
            raise UsageError("step() without backward(): call engine.backward(loss) first")
        if not self.is_boundary:
            return False
        self._boundary.optimizer.check_not_replaced()
        self._boundary.step(self.optimizer, keep=False)
        return True

    @lasting()
    def attach(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Train with an optimizer, or a list of them, made from `model.parameters()` after zero.initialize.

        Collective. The optimizer is then as one that was given to zero.initialize. It takes the place of one
        that the engine has, whose moments and gradients are dropped, and which can step no more; the weights
        and the number of steps stay. Raises, before anything is changed, UsageError for the optimizer that
        the engine has, OptimizerError for what zero.initialize would refuse, RankMismatchError if ranks have
        different ones, and OffloadError if a rank finds no space on its disk.
        """
        self.wait_for_checkpoint()
        self._integrity.check_present()
        self._integrity.check_complete()
        self._integrity.check_own("attach")
        self._pass.check_not_in_use("attach")
        self._attach(self, optimizer=optimizer)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In the block, backwards are not the last of a step, as in DistributedDataParallel.

        Not with a number for gradient_accumulation_steps: the engine then knows the last one itself.
        With accumulate="local" and in stage 1, ranks exchange no gradients in the block. Otherwise each
        backward leaves this rank's slice of the sum over the ranks, as always, and only an exchange of which
        parameters were used is saved. The last backward of a step must be outside.
        """
        if self.config.gradient_accumulation_steps is not None:
            raise UsageError(
                "no_sync() needs a loop that decides when a step is due: leave gradient_accumulation_steps "
                "out of zero.Config; with a number, accumulate='local' reduces once per step"
            )
        before, self._pass.sums_ranks = self._pass.sums_ranks, False
        try:
            yield
        finally:
            self._pass.sums_ranks = before

    @explained
    def zero_grad(self) -> None:
        """Drop the gradients of all micro-batches since the last optimizer step."""
        self._pass.zero_grad()

    def explain(self) -> Explanation:
        """Report what compilation has made of the model so far; `str()` of the result is for people."""
        if self._compiled is None:
            raise UsageError("explain() describes compiled models: set zero.Config(compile=True)")
        return self._compiled.explain()

    @property
    def steps(self) -> int:
        """Optimizer steps taken, skipped ones included (see `skipped_steps`)."""
        return self._boundary.steps

    @property
    def is_boundary(self) -> bool:
        """Whether the next step() is an optimizer step."""
        return self._pass.step_is_due

    @property
    def grad_norm(self) -> Tensor | None:
        """The global L2 norm of the gradient at the last step, before clipping, 0-dim fp32.

        None from backward() until it is measured, by the step or by clipping. Where nothing clips and there
        is no loss scale, the first reading, on any rank, returns None and asks for it: from the next step on
        it is measured, at the cost of a pass over the gradients and one collective. Reading it as a number
        waits for the device.
        """
        self._communicator.norm_is_read = True
        return None if self._factor.norm is None else self._factor.norm.clone()

    @property
    def loss_scale(self) -> Tensor | None:
        """The loss scale, 0-dim fp32 on the device; None if there is none, see `Config`."""
        return None if self._loss_scale is None else self._loss_scale.scale.clone()

    @property
    def skipped_steps(self) -> int:
        """How many of `steps` changed nothing because gradients overflowed; 0 without a loss scale.

        With one, reading it waits for the device.
        """
        return 0 if self._loss_scale is None else int(self._loss_scale.skipped)

    @property
    def traffic(self) -> Traffic:
        """Collectives issued so far, by kind: counts and bytes. `traffic.clear()` resets them."""
        return self._communicator.ledger.traffic

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on."""
        return self.accelerator.device

    @property
    def rank(self) -> int:
        """This rank's number among those that have different data."""
        return self._communicator.group.rank

    @property
    def world_size(self) -> int:
        """How many ranks have different data; with a mesh, those of its data dimensions."""
        return self._communicator.group.size

    def train(self, mode: bool = True) -> Engine:
        """`module.train(mode)`."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """`module.eval()`."""
        return self.train(False)

    def refresh_weights(self) -> None:
        """Update the weights from the optimizer's values; collective.

        Call it after changing those values in place through `optimizer.param_groups` outside of a step, as
        train() and eval() of schedule-free optimizers do, or a clamp. Until then forwards, `zero.gathered`,
        whole states, saves and loads raise UsageError, except load_checkpoint with strict=True, which
        replaces all values. Call it only between optimizer steps and outside of `zero.gathered`.
        """
        self._integrity.check_present()
        if self._pass.backwards:
            raise UsageError(
                "refresh_weights() was called between backward() and step(): call engine.step() first"
            )
        self._integrity.check_complete()
        self._pass.check_not_in_use("refresh_weights")
        self._boundary.refresh_weights()

    # -- whole values (collective: every rank must call these) ------------------------------------------

    @explained
    def state_dict(
        self,
        master: bool = False,
        *,
        trainable_only: bool = False,
        include: str | Iterable[str] | None = None,
    ) -> dict[str, Any]:
        """Return the whole model in rank 0's host memory, and {} on other ranks.

        The result can be loaded into the plain model. master: return the fp32 masters instead of the 16-bit
        weights. trainable_only: return the parameters that are trained, such as adapters, and no frozen ones,
        buffers or extra state. include: return what one of these shell patterns matches, e.g. "*.lora_*". A
        tied parameter is returned under all its names or none. Units that have nothing to return are not
        gathered.

        Raises UsageError after an optimizer step or a load that was interrupted, for a pattern that matches
        nothing, and if nothing is left.
        """
        selection = Selection.of(trainable_only, include)
        self._check_whole()
        state = model_state.read(self.module, self._full_parameters, master, selection)
        self._communicator.check()
        return state

    @explained
    def load_state_dict(self, state: Mapping[str, Any] | None, strict: bool = True) -> None:
        """Load a whole model from rank 0's `state` (ignored on other ranks) into shards and masters.

        Gradients since the last optimizer step are dropped. Raises StateError, on every rank and before
        anything changes, for names or shapes that do not fit; after any other error in the middle of the
        load, the engine refuses to go on until a checkpoint is loaded.
        """
        self._check_loadable("load_state_dict")
        with self._boundary.loading(everything=False):
            model_state.load(self.module, self._full_parameters, state, strict, self._boundary.begin_load)

    def full_master(self, name: str) -> Tensor:
        """Return the whole fp32 master of parameter `name`, in the parameter's shape, on every rank.

        A frozen parameter has no master: its own value is returned, in fp32. Raises UsageError after an
        optimizer step or a load that was interrupted.
        """
        self._integrity.check_complete()
        _, group, index = self._full_parameters.locate(name)
        self._full_parameters.take_in_frozen()
        value = self._full_parameters.parameter(name, group.widest)
        return as_distributed(group.parameters[index], value)

    def full_gradient(self, name: str) -> Tensor | None:
        """Return the whole gradient of parameter `name`, fp32: averaged and unscaled, before `clip_norm`,
        times what the program has multiplied it by.

        Call it between backward() and step(). None if no rank has a gradient.
        """
        self._integrity.check_complete()
        _, group, index = self._full_parameters.locate(name)
        if self._pass.backwards and not self.is_boundary:
            if self._reducer.policy.local:
                raise UsageError(
                    "with local accumulation, gradients are complete only at the last micro-batch"
                )
            self._reducer.agree_on_usage()
        have = next((g for g in self._reducer.all if g.group is group), None)
        if have is None or not have.slice.present or index not in have.used:
            return None
        parameter = group.parameters[index]
        return as_distributed(parameter, self._held_gradients.full(parameter))

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of this step to an L2 norm of at most `max_norm`; return the norm before, 0-dim.

        Call it between backward() and step(), on every rank. The same as `Config(clip_norm=max_norm)`, bit
        for bit, for a limit that changes from step to step; `torch.nn.utils.clip_grad_norm_` works, too.
        Nothing waits for the device. Raises UsageError before the last micro-batch.
        """
        self._check_boundary("clip_grad_norm_")
        return self._held_gradients.clip(max_norm)

    def gradient_norms(self) -> dict[str, Tensor]:
        """Return the L2 norm of each parameter's gradient, by name, 0-dim fp32: averaged and unscaled.

        Call it between backward() and step(), e.g. for logging by layer. Parameters that no rank has used
        are left out. One collective for all; reading a number waits for the device. Before the last
        micro-batch it raises UsageError.
        """
        self._check_boundary("gradient_norms")
        return self._held_gradients.norms()

    def parameter_statistics(self) -> dict[str, ParameterStatistics]:
        """Return norms and histograms of all trained parameters and their gradients, by name.

        For logging by layer, between backward() and step(). Histograms are of magnitudes, with a bucket for
        each power of two (`zero.whole.parameter_statistics.EDGES`). One collective for all; reading a number
        waits for the device. Before the last micro-batch it raises UsageError.
        """
        self._check_boundary("parameter_statistics")
        return measure(self._reducer, self._held_gradients.factors_of)

    def full_optimizer_state(self, name: str) -> dict[str, Tensor]:
        """Return the whole optimizer state of `name` (for Adam: step, exp_avg, exp_avg_sq), in its dtypes.
        Moments in 8 bits are there as the values that they stand for, and as their codes and scales. Of a
        DTensor, what has a value for each element is that of this rank's block.

        Raises UsageError after an optimizer step or a load that was interrupted.
        """
        self._integrity.check_complete()
        self._integrity.check_state()
        return OptimizerState(self._full_parameters, self._boundary.optimizer).of(name)

    @explained
    def save_checkpoint(
        self,
        path: str | Path,
        state: Mapping[str, Any] | None = None,
        *,
        rank_state: Mapping[str, Any] | None = None,
        keep_last: int | None = None,
        async_: bool = False,
        trainable_only: bool = False,
        include: str | Iterable[str] | None = None,
    ) -> None:
        """Write everything needed to resume training to the directory `path`, e.g. "runs/a/step-100".

        Every rank writes its share. The checkpoint then takes its name in one step, replacing any older
        checkpoint of that name, and `latest` beside it is made to point to it.

        state: values of rank 0 for load_checkpoint to return: JSON values, tuples, tensors, and objects with
        state_dict(), such as schedulers. rank_state: the same, but each rank's own. keep_last: afterwards,
        of the checkpoints in the directory that were saved with keep_last, remove all but this many. async_:
        return once all ranks have copied their state, and write it while training goes on. The copy takes
        host memory of the state's size, which is kept for the next save. An error in writing is logged, and
        raised by the next save_checkpoint, load_checkpoint or wait_for_checkpoint. trainable_only, include:
        what to save of the model, as in state_dict(), on all ranks alike; the checkpoint says what it is
        without.

        Raises, on every rank, UsageError for what cannot be saved and CheckpointError if writing fails; what
        concerns one rank only names it. Existing checkpoints stay as they were. What fails after the
        checkpoint has its name, such as a removal, is logged as a warning, and done by the next save.
        """
        rank, given = rank_state or {}, state or {}
        select = partial(Selection.of, trainable_only, include)
        with self._communicator.observation.within("checkpoint"):
            self._checkpoints.save(
                path, self.steps, given, rank, keep_last, async_, self._check_savable, select
            )

    @explained
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

        path: a checkpoint, or a directory of several, in which `latest` is loaded. restore: objects with
        load_state_dict(), by their key in `state`. strict: refuse missing and unexpected names.
        weights_only: load parameters and buffers only. rename: a mapping or function from names in the
        checkpoint to names in the model, None for names to leave out. Random number generators are restored
        on the ranks that saved them. What the checkpoint was saved without (trainable_only, include) keeps
        its values: rank 0 logs a warning, and the result's `left_out` has the names.

        Raises, on every rank and before anything changes: CheckpointError if there is no complete checkpoint,
        CorruptCheckpointError if its manifest is not valid, and StateError with all names, options and states
        that do not fit. After a CorruptCheckpointError for damage that shows later, the engine refuses to go
        on until a whole checkpoint has been loaded.
        """
        self._pass.check_not_in_use("load_checkpoint")
        self._integrity.check_own("load_checkpoint")
        self._integrity.check_state()
        self._check_model()
        if not strict:  # what the checkpoint does not have stays as it is
            self._integrity.check_refreshed()
        options = LoadOptions(restore or {}, strict, weights_only, rename)
        interrupted = self._integrity.interrupted
        with self._boundary.loading(everything=strict and not weights_only):
            loaded = self._checkpoints.load(path, options, self._begin_checkpoint)
        if interrupted and loaded.left_out:
            self._integrity.interrupt()
        if not weights_only:
            self._boundary.steps = loaded.steps
        return loaded

    def load_pretrained(self, path: str | Path, *, strict: bool = True, rename: Rename | None = None) -> None:
        """Fill parameters and buffers from safetensors, each rank reading its slices; collective.

        Takes the arguments of `zero.load_pretrained`, which does the same before `zero.initialize`. The
        optimizer's state and the step count stay as they are. Raises the same errors, on every rank, before
        anything changes; after an error in reading, the engine refuses to go on until a checkpoint is loaded.
        """
        self._check_loadable("load_pretrained")
        request = Request(as_path(path), strict, rename, self._checkpoints.storage)
        with self._boundary.loading(everything=False):
            fill_engine(self.module, self._full_parameters, request, self._boundary.begin_load)

    def save_pretrained(
        self, folder: str | Path, *, dtype: torch.dtype | None = None, max_shard_size: int = 5_000_000_000
    ) -> None:
        """Write the whole weights to `folder` as transformers' `from_pretrained` reads them. Collective.

        The first rank writes, and has one unit whole at a time; of DTensors all ranks have it. With the
        weights are config.json and whatever else a model of transformers writes; of a model of PEFT, its
        adapters are written and not its base. Other files in `folder` stay, and weights there are replaced in
        the end: a model's by a model, an adapter's by an adapter. Folders above it are made. dtype: of
        floating point values, cast from the fp32 masters; None for each weight's own. max_shard_size: bytes
        of a file.

        Raises, on every rank and leaving nothing behind, CheckpointError if writing fails, and UsageError for
        parameters that differ by rank or are packed, adapters that are DTensors, DTensors without `mesh=`,
        and a dtype for prompts, which PEFT computes.
        """
        from zero.whole import export  # what it imports, no training needs

        self._check_whole()
        request = export.Request(as_path(folder), dtype, max_shard_size, self._checkpoints.storage)
        export.save(self.module, self._full_parameters, request, partial(self.state_dict, dtype is not None))

    def wait_for_checkpoint(self) -> None:
        """Wait until a save in the background is complete; raises its error."""
        self._checkpoints.wait()

    # -- memory (collective) -----------------------------------------------------------------------------

    def offload_states(self) -> None:
        """Move parameters and optimizer state to host memory, and release the device's memory.

        For a time in which something else runs on the device, such as generation or evaluation. Until
        `reload_states()`, checkpoints and whole values are still available, and whatever uses or changes
        parameters raises UsageError. Call it only between optimizer steps and outside of `zero.gathered`.
        After an error, such as no room on the host, part of the state has been moved: call this again, or
        `reload_states()`, on every rank.
        """
        if self._pass.has_gradients:
            raise UsageError(
                "offload_states() was called between backward() and step(), or before the gradients were "
                "dropped: call step(), then zero_grad(), first"
            )
        self._integrity.check_complete()
        self._pass.check_not_in_use("offload_states")
        self._full_parameters.take_in_frozen()
        if not self._state_offload.away:
            self._placement.pause()
        self._pass.release_all()
        self._reducer.leave_device()
        self._full_parameters.begin_write()
        self._state_offload.offload()
        if self._compiled is not None:
            self._compiled.offload_state()
        self.accelerator.streams.synchronize()
        self.accelerator.memory.trim()

    def reload_states(self) -> None:
        """Bring back what `offload_states` moved, bit for bit. Does nothing if nothing is away.

        A rank that has no room raises OutOfMemoryError, and the others raise OffloadError; once there is
        room, every rank may call this again.
        """
        if self._state_offload.away:
            self._state_offload.reload()
            self._placement.resume()

    def trace_memory(self, steps: int = 1) -> None:
        """Trace the device's memory through the next `steps` optimizer steps, for `memory_report`.

        A step that has already begun with a forward is not traced; tracing starts with the one after it.
        Meanwhile the device's peak statistics are reset many times.
        """
        if steps < 1:
            raise UsageError(f"trace_memory(steps={steps}): at least one step is needed")
        self._tracer.steps = max(self._tracer.steps, steps)  # offload="auto" may be measuring already
        self._tracer.wants_history = True

    def memory_report(self) -> MemoryReport:
        """Report the last traced optimizer step: a timeline, its peaks by phase, a page to `save`."""
        if self._tracer.report is None:
            raise UsageError("no step was traced: call engine.trace_memory() and train a step")
        return self._tracer.report

    # -- observation --------------------------------------------------------------------------------------

    def observe(self, *observers: Observer, flops_per_token: float = 0, peak_flops: float = 0) -> Observing:
        """Tell observers, such as those in `zero.observe`, of every step and event from now on.

        Call it on every rank; those of rank 0 are told, and others that ask for it (`Observer.every_rank`).
        The result's `close()`, the end of a `with` block around it, or of the program, tells what is left.

        flops_per_token: the model's floating-point operations, forward and backward (see `count_flops`).
        peak_flops: of the device, in a second; that which its backend declares where it is left out. Both are
        for the MFU. Raises UsageError for what is no observer.
        """
        for each in observers:
            if not isinstance(each, Observer):
                raise UsageError(f"observe() takes observers, such as zero.observe.Console(), not {each!r}")
        observation = self._communicator.observation
        first = self._communicator.whole.rank == 0
        mine = [each for each in observers if first or each.every_rank]
        if mine:
            peak_flops = peak_flops or self.accelerator.capabilities.peak_flops
            observation.begin(mine, self._run(), weakly(self._facts), flops_per_token, peak_flops)
        return Observing(observation, mine)

    def log(self, **values: float | Tensor) -> None:
        """Tell the observers numbers of the step under way, or of the last one until the next begins.

        values: numbers or tensors of one element, of this rank, which travel to the host without a wait. What
        is logged several times in a step is averaged; `tokens` are added up and give tokens per second.
        Raises UsageError for other values, and for names that observers are told by themselves.
        """
        self._communicator.observation.log(values)

    @torch.no_grad()
    def count_flops(self, *args: Any, **kwargs: Any) -> int:
        """The floating-point operations of a forward and backward of the model with these inputs, on this
        rank; collective.

        Runs a forward, which draws random numbers and updates BatchNorm's statistics as any other does in
        training: count before a checkpoint is loaded, or in `eval()`. A backward counts twice its operations,
        as is usual for MFU: recomputation does not count, nor do frozen parameters count less. Raises
        UsageError for a compiled model.
        """
        if self._compiled is not None:
            raise UsageError(_NO_SINGLE_OPERATIONS)
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            self(*args, **kwargs)
        return 3 * int(counter.get_total_flops())

    def profile(self, steps: int = 3, folder: str | Path = "profile") -> None:
        """Profile the next `steps` steps on rank 0, each from its first forward to that of the next.

        Writes trace.json, with the engine's ranges, and summary.txt to `folder`: the shares of computation,
        gathers, reduces, copies between tiers, optimizer and the rest, and what was waited for by unit. A
        folder that cannot be written to is warned of at once.
        """
        if steps < 1:
            raise UsageError(f"profile(steps={steps}): at least one step is needed")
        self.observe(Profiler(as_path(folder), steps))

    def record_flight(self, folder: str | Path) -> None:
        """Write this rank's last 200 collectives and the stacks of its threads to `folder` when a collective
        fails, on SIGUSR1, and when another rank has written its own.

        Every rank calls this with a folder that all see, for all engines of the process, or is started with
        ZERO_FLIGHT_RECORDER=folder; `zero explain-hang folder` says what happened.
        """
        record_flight(as_path(folder).absolute())

    # -- inside -----------------------------------------------------------------------------------------

    def _run(self) -> Run:
        parameters = sum(p.numel() for p in self.module.parameters())
        settings = self.config.model_dump(mode="json")
        name, device = type(self.module).__name__, str(self.device)
        return Run(name, device, self.rank, self.world_size, parameters, self.steps, settings)

    def _facts(self) -> Facts:
        """Of the step that is just over."""
        traffic, scale, groups = self.traffic, self._loss_scale, self.optimizer.param_groups
        numbers = {"learning_rate": groups[0]["lr"] if groups else 0.0, "grad_norm": self._factor.norm}
        if scale is not None:
            numbers |= {"loss_scale": scale.scale, "skipped": scale.in_a_row}
        on_device = {name: number for name, number in numbers.items() if isinstance(number, Tensor)}
        known = {name: number for name, number in numbers.items() if name not in on_device}
        known |= {"memory": self._tracer.now(), "ranks": self.world_size}
        totals: dict[str, Mapping[str, float]] = {
            "calls": dict(traffic.calls),
            "bytes": dict(traffic.bytes),
            "units": dict(traffic.units),
            "moved": self._boundary.stores.moved,
            "busy": self._boundary.stores.busy,
            "waited": {"waited": self._communicator.waited},
        }
        return Facts(known, totals, on_device)

    def _begin_checkpoint(self, whole: bool) -> None:
        """Begin to load a checkpoint. whole: it has the whole model; otherwise the rest stays as it is."""
        if not whole:
            self._integrity.check_refreshed()
        self._boundary.begin_load()

    def _check_loadable(self, call: str) -> None:
        """Check that weights may be loaded from elsewhere."""
        self._integrity.check_present()
        self._integrity.check_own(call)
        self._pass.check_not_in_use(call)
        self._check_model()
        self._integrity.check_refreshed()

    def _check_savable(self) -> None:
        """Check that there is something whole to save."""
        self._check_whole()
        self._integrity.check_own("save_checkpoint")
        self._integrity.check_state()
        if self._pass.backwards:
            raise UsageError(
                "save_checkpoint() was called between the micro-batches of an optimizer step, whose "
                "gradients would be lost: save after engine.step(), or call engine.zero_grad() first"
            )

    def _check_whole(self) -> None:
        """Check that the whole model can be read as it is."""
        self._integrity.check_complete()
        self._check_model()
        self._integrity.check_refreshed()

    def _check_boundary(self, call: str) -> None:
        """Check that the gradients of an optimizer step are complete."""
        self._integrity.check_complete()
        if not self.is_boundary:
            raise UsageError(
                f"{call}() was called before the last backward of an optimizer step: its gradients are "
                "complete once engine.is_boundary is true"
            )

    def _check_model(self) -> None:
        """Check, before whole values are saved or loaded, that the model's parameters are the engine's."""
        self._integrity.check_model()
        self._full_parameters.take_in_frozen()


_NO_SINGLE_OPERATIONS = (
    "count_flops() looks at single operations: count them in an engine without zero.Config(compile=...)"
)
_ANOTHER_WAY = (
    "the backward entered a unit other than through its output: the loss uses something that was computed "
    "inside the unit, such as a feature that a hook captured or a module keeps. Return it from the unit, or "
    "run forward and backward inside `with zero.gathered(model):`"
)
