"""The hooks on a model and on its parameters, which report to the pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor, nn

from zero.gradients.group_gradients import GroupGradients
from zero.sharding.distributed import is_distributed, local_gradient
from zero.tiers.tier import wanted
from zero.training_pass.training_pass import TrainingPass
from zero.training_pass.unit_hooks import UnitHooks


def hook_model(module: nn.Module, training_pass: TrainingPass) -> None:
    """Have the pass told of forwards of the model and its units, and of gradients.

    The hooks hold the pass and with it what an engine trains with: a model whose engine has gone goes on
    gathering.
    """
    for calls in training_pass.calls:
        UnitHooks(calls, training_pass).register()
    for gradients in training_pass.reducer.all:
        for index, parameter in enumerate(gradients.group.parameters):
            receiver = _receiver(training_pass, gradients, index)
            training_pass.handles.append(parameter.register_post_accumulate_grad_hook(receiver))
    begin = training_pass.begin_forward
    training_pass.handles.append(module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True))
    if wanted(training_pass.config.offload, "params").stored:
        end = training_pass.end_forward
        training_pass.handles.append(module.register_forward_hook(end, always_call=True))
    if training_pass.communicator.group.size > 1:
        training_pass.handles.append(module.register_forward_hook(training_pass.agree_on_forward))


def _receiver(training_pass: TrainingPass, gradients: GroupGradients, index: int) -> Callable[[Tensor], None]:
    """Make a hook that hands a gradient to the pass, once autograd has accumulated it.

    It holds only weak references: Python's garbage collector does not see into these hooks, so a cycle would
    never be freed.
    """
    pass_alive, gradients_alive = weakref.ref(training_pass), weakref.ref(gradients)

    distributed = is_distributed(gradients.group.parameters[index])

    def receive(parameter: Tensor) -> None:
        alive, place = pass_alive(), gradients_alive()
        if alive is not None and place is not None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:  # None: there is none, or a compiled graph has handed it over
                graphless = gradient.detach() if gradient.requires_grad else gradient  # create_graph=True
                if distributed:
                    graphless = local_gradient(parameter, graphless)
                alive.receive(place, index, graphless)

    return receive
