"""The hooks on a model and on its parameters, which report to the pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero.errors import UsageError
from zero.gradients.group_gradients import GroupGradients
from zero.sharding.distributed import is_distributed, local_gradient
from zero.tiers.tier import wanted
from zero.training_pass.training_pass import TrainingPass
from zero.training_pass.unit_hooks import UnitHooks
from zero.warning import warn


def hook_model(module: nn.Module, training_pass: TrainingPass) -> None:
    """Have the pass told of forwards of the model and its units, and of gradients.

    The hooks hold the pass and with it what an engine trains with: a model whose engine has gone goes on
    gathering.
    """
    for calls in training_pass.calls:
        UnitHooks(calls, training_pass).register()
    told_of_later = _Once()
    for gradients in training_pass.reducer.all:
        for index, parameter in enumerate(gradients.group.parameters):
            if parameter._post_accumulate_grad_hooks:
                training_pass.handles.extend(_watch_earlier_hooks(parameter, gradients.group.names[index]))
            receiver = _receiver(training_pass, gradients, index, told_of_later)
            training_pass.handles.append(parameter.register_post_accumulate_grad_hook(receiver))
    begin = training_pass.begin_forward
    training_pass.handles.append(module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True))
    if wanted(training_pass.config.offload, "params").stored:
        end = training_pass.end_forward
        training_pass.handles.append(module.register_forward_hook(end, always_call=True))
    if training_pass.communicator.group.size > 1:
        training_pass.handles.append(module.register_forward_hook(training_pass.agree_on_forward))


class _Once:
    """Whether something has been told."""

    done = False


def _watch_earlier_hooks(parameter: nn.Parameter, name: str) -> list[RemovableHandle]:
    """Raise UsageError in a backward where the program's own hooks on an accumulated gradient write to the
    parameter, as in https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html:
    each rank would step with its own gradient.

    Must be called before the engine's own hook is registered.
    """
    version = 0

    def note(parameter: Tensor) -> None:
        nonlocal version
        version = parameter._version

    def compare(parameter: Tensor) -> None:
        if parameter._version != version:
            raise UsageError(_STEPS_IN_BACKWARD.format(name))

    hooks = parameter._post_accumulate_grad_hooks
    theirs = dict(hooks)
    hooks.clear()  # torch calls them in the order in which they came to it
    first = parameter.register_post_accumulate_grad_hook(note)
    hooks.update(theirs)
    return [first, parameter.register_post_accumulate_grad_hook(compare)]


def _receiver(
    training_pass: TrainingPass, gradients: GroupGradients, index: int, told_of_later: _Once
) -> Callable[[Tensor], None]:
    """Make a hook that hands a gradient to the pass, once autograd has accumulated it.

    It holds only weak references: Python's garbage collector does not see into these hooks, so a cycle would
    never be freed. With the first gradient it warns of hooks that were registered after it.
    """
    pass_alive, gradients_alive = weakref.ref(training_pass), weakref.ref(gradients)

    distributed = is_distributed(gradients.group.parameters[index])
    hooks = 1 + len(gradients.group.parameters[index]._post_accumulate_grad_hooks or ())
    is_first = True

    def receive(parameter: Tensor) -> None:
        nonlocal is_first
        alive, place = pass_alive(), gradients_alive()
        if alive is not None and place is not None:
            if is_first:
                is_first = False
                if len(parameter._post_accumulate_grad_hooks) > hooks and not told_of_later.done:
                    told_of_later.done = True
                    warn(_LATER_HOOKS, rank=alive.communicator.group.rank)
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:  # None: there is none, or a compiled graph has handed it over
                graphless = gradient.detach() if gradient.requires_grad else gradient  # create_graph=True
                if distributed:
                    graphless = local_gradient(parameter, graphless)
                alive.receive(place, index, graphless)

    return receive


_STEPS_IN_BACKWARD = (
    "a hook on parameter {!r} (register_post_accumulate_grad_hook) changes the parameter in the backward, "
    "with the gradient of one rank alone. Give zero.initialize one optimizer for all parameters instead of "
    "such that step in hooks: the engine reduces and shards gradients while the backward runs, so they would "
    "save little memory"
)
_LATER_HOOKS = (
    "parameters have hooks (register_post_accumulate_grad_hook) from after zero.initialize. They find "
    "p.grad = None, because the engine has taken the gradient, and an optimizer that steps in them steps "
    "nothing. To read or change gradients, use p.register_hook, or register them before zero.initialize; to "
    "train, give zero.initialize one optimizer for all parameters"
)
