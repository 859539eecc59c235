"""A model whose calls run through torch.compile: as one graph, or unit by unit where it is none.

As one graph, the graph gathers and releases for itself and the hooks of units stand aside
(`TrainingPass.in_graph`). Where the model does not trace as a whole, each unit's forward is compiled by
itself and the hooks gather it, as in the eager engine; graph breaks inside a unit are dynamo's business then.

Importing this module imports the compiler, which takes seconds, so only those who compile do so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import reset_code
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from zero.compiled.backend import NotOneGraph, ShardingBackend
from zero.compiled.explain import Explanation
from zero.compiled.facts import gather_facts
from zero.compiled.persistence import Persistence
from zero.compiled.replays import Replays
from zero.compiled.runtime import Runtime
from zero.config.training import Config
from zero.errors import UsageError, ZeroError, some
from zero.sharding.distributed import follow_local
from zero.sharding.forms import with_tensors_inside
from zero.sharding.lifetime import ModelRef, weakly
from zero.sharding.sharded_unit import Keep
from zero.sharding.tensors import iter_tensors
from zero.tiers.stores import Stores
from zero.tiers.tier import wanted
from zero.training_pass.training_pass import TrainingPass


class CompiledModel:
    """Takes over the calls of `module`, as `config.compile` says; its other modules, called by themselves,
    stay eager."""

    def __init__(self, module: nn.Module, stores: Stores, training_pass: TrainingPass) -> None:
        config, communicator = training_pass.config, training_pass.communicator
        assert config.compile is not None
        self._settings = settings = config.compile
        self._model = ModelRef(module)
        self._units = tuple(training_pass.units)
        self._pass = training_pass
        self._around = communicator.together if wanted(config.offload, "params").stored else nullcontext
        self._telling = weakly(communicator.telling)
        self._runtime = runtime = Runtime(stores.accelerator, training_pass)
        facts, leaving = gather_facts(runtime.handle, training_pass), _leaving(config, stores)
        self._replays = Replays(stores.accelerator) if settings.graphs else None
        compiling = settings, leaving, self._replays, self._telling
        self._backend = ShardingBackend(facts, runtime.parameters, *compiling)
        self._persistence = Persistence(runtime, stores.accelerator, communicator, settings.persist_budget)
        for each in module.modules():
            _settle_hook_order(each)
        for unit in self._units:
            unit.guard.expose()
            for parameter in (p for group in unit.groups for p in group.parameters):
                follow_local(parameter)  # which tracers take for a view elsewhere
            unit.conceal()
        self._why = ""  # what kept the model from being one graph
        self._lost = ". Its activations stay on the device" if leaving else ""
        self._lost += ". No unit persists" if settings.persist_budget != 0 else ""
        self._lost += ". No graph is captured" if settings.graphs else ""
        self._parameters = [p for u in self._units for g in u.groups if g.trainable for p in g.parameters]
        self._frames: dict[tuple[bool, ...], Callable[..., Any]] = {}  # by which of them are not frozen
        self._is_one_graph = True
        self._units_wait = False  # to be compiled, for the backward of a forward that ran without
        # What Module.compile() sets: calls of the module come here. Who compiles them is compiled around it.
        module._compiled_call_impl = torch.compiler.disable(self)
        inside = with_tensors_inside(module)
        if inside:
            with self._by_units(_INSIDE.format(some(inside))):
                self._compile_units()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._pass.gradients_aside():
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_one_graph or torch._C._len_torch_dispatch_stack():
            return self._model()._call_impl(*args, **kwargs)
        begun = self._pass.prepare_forward(args, kwargs)
        args, kwargs = (args, kwargs) if begun is None else begun
        try:
            with nullcontext() if self._pass.in_backward else self._around():
                return self._as_one_graph(self._frame(), args, kwargs)
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, ZeroError):
                raise error.inner_exception from error
            return self._go_on(error.inner_exception, args, kwargs)
        except _UNTRACED as error:
            return self._go_on(error, args, kwargs)

    def explain(self) -> Explanation:
        """What the passes did so far."""
        mode = "graph" if self._is_one_graph else "units"
        reports, kept = tuple(self._backend.reports), self._persistence
        failed = self._backend.generator.failed
        replays = None if self._replays is None else self._replays.count()
        found = self._runtime.peak, kept.room, kept.chosen, failed, replays
        return Explanation(mode, self._why, reports, *found)

    def offload_state(self) -> None:
        """Give back the device's memory that captured graphs keep."""
        if self._replays is not None:
            self._replays.drop()

    def after_step(self) -> None:
        """Collective, between optimizer steps."""
        if self._is_one_graph:
            self._persistence.after_step()
        elif self._units_wait:
            self._compile_units()

    def _frame(self) -> Callable[..., Any]:
        """What calls the model through torch.compile; another where other parameters are frozen than before,
        which dynamo of torch 2.11 does not look at."""
        with torch._C.DisableTorchFunctionSubclass():
            thawed = tuple(p.requires_grad for p in self._parameters)
            if any(map(_has_hooks, self._parameters)):
                raise UsageError(_HOOKS)
        frame = self._frames.get(thawed)
        if frame is None:
            call = _frame(self._model(), len(self._frames))
            # Dynamo holds graphs in this file's globals for as long as the code has them, and code for ever.
            weakref.finalize(self, reset_code, call.__code__).atexit = False
            frame = self._frames[thawed] = torch.compile(
                call, backend=self._backend, fullgraph=True, dynamic=self._settings.dynamic
            )
        return frame

    def _as_one_graph(self, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._runtime.begin()
        for unit in self._units:  # a checkpoint that recomputes detaches what graphs save, and reads nothing
            unit.guard.expose(released=self._pass.in_backward)
        self._pass.in_graph = True
        try:
            with _hooks_spare_parameters():
                result = whole(self._model(), *args, **kwargs)
            self._show_returned(result)
            self._runtime.pending_backwards.expect(result)
            return result
        except BaseException:
            self._runtime.abandon()
            raise
        finally:
            self._pass.in_graph = False
            for unit in self._units:
                unit.conceal()

    def _show_returned(self, result: Any) -> None:
        """A parameter that is returned has its values until the backward is over, as without compile."""
        returned = {id(tensor) for tensor in iter_tensors(result) if isinstance(tensor, nn.Parameter)}
        for unit in self._units if returned else ():
            if any(id(p) in returned for group in unit.groups for p in group.parameters):
                unit.gather_to_keep(Keep.VIEWED)

    @contextmanager
    def _by_units(self, why: str) -> Iterator[None]:
        """The model is not one graph, and the user is told, unless the block raises."""
        told = (
            f"the model is compiled unit by unit, because it is not one graph: {why} (see engine.explain())"
        )
        with self._telling("units", told + self._lost):
            yield
        self._why = why
        self._is_one_graph = False

    def _go_on(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Go on without the whole graph, unless the model itself raises on these arguments."""
        with self._by_units(_reason(error)):
            result = self._model()._call_impl(*args, **kwargs)
        # What a backward recomputes it computes as it was here; a checkpoint may have turned gradients off.
        self._units_wait = torch.is_grad_enabled() or self._model().training
        if not self._units_wait:
            self._compile_units()
        return result

    def _compile_units(self) -> None:
        self._units_wait = False
        inner = self._settings.inner
        backend = self._backend.generator.compile_unit if inner == "inductor" else inner
        root = self._model()  # which what it calls would be compiled into
        every = (module for unit in self._units for module in unit.hooked_modules if module is not root)
        for module in dict.fromkeys(every):
            module.forward = torch.compile(module.forward, backend=backend, dynamic=self._settings.dynamic)


def _leaving(config: Config, stores: Stores) -> float:
    """The part of the activations that leaves the device, from 0 to 1."""
    leaves = not wanted(config.offload, "activations").on(stores.accelerator).near
    return config.offload.part("activations") if leaves else 0.0


# What says that a model is not one graph, here or behind dynamo.
_UNTRACED = (TorchDynamoException, FailOnRecompileLimitHit, GuardOnDataDependentSymNode, NotOneGraph)


_HOOKS = (
    "a parameter has hooks (register_hook, register_post_accumulate_grad_hook), which gradients in a "
    "compiled graph never reach: remove the hooks, or remove zero.Config(compile=...)"
)


_INSIDE = "parameters have their values in tensors inside them, which one graph could not gather: {}"


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Whether a parameter has hooks besides the engine's own, which waits for what is accumulated."""
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}  # None: there never was one
    return bool(parameter._backward_hooks) or len(hooks) > 1


def _reason(error: Exception) -> str:
    """What dynamo could not trace, and where: the innermost line of the user's code that it names."""
    what = str(error).strip().split("\n")[0]
    _, _, code = str(error).partition("from user code:")
    places = [line.strip() for line in code.split("\n") if line.lstrip().startswith("File ")]
    return f"{what} ({places[-1]})" if places else what


def _settle_hook_order(module: nn.Module) -> None:
    """Dynamo of torch 2.11 finds a hook by its place of registration and not, as modules do, of its call."""
    hooks = module._forward_pre_hooks
    in_order = list(hooks.items())
    hooks.clear()
    hooks.update(in_order)


def _frame(module: nn.Module, number: int) -> Callable[..., Any]:
    """A function that calls `module`, its first argument, with its hooks, for dynamo to begin at.

    Dynamo keeps its graphs, and counts them against its limit, by code object: every engine has its own, and
    each of its frames.
    """

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # dynamo left the frame alone, and nothing is gathered here
            raise NotOneGraph("torch.compile is disabled here, or skips this call")
        return module._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"zero_{id(module)}_{number}")
    return call


@dataclass(frozen=True)
class _Packed:
    """What the user's hook returned for a tensor."""

    value: Any


def _hooks_spare_parameters() -> AbstractContextManager[Any]:
    """Have the user's hooks on saved tensors, such as `save_on_cpu()`, called for everything but parameters,
    around a graph's forward: these are saved without values and gathered again."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return nullcontext()
    pack, unpack = hooks
    return saved_tensors_hooks(
        lambda tensor: tensor if isinstance(tensor, nn.Parameter) else _Packed(pack(tensor)),
        lambda packed: unpack(packed.value) if isinstance(packed, _Packed) else packed,
    )
