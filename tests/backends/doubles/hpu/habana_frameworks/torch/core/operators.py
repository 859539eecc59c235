"""torch.ops.hpu.optimizer_adamw: two signatures, one per mode; in lazy mode moments must not be views."""

import torch

SHARED = (
    "optimizer_adamw(Tensor[] gradient_vec, Tensor(a!)[] weight_vec, Tensor(b!)[] exp_avg_vec, "
    "Tensor(c!)[] exp_avg_sq_vec, Tensor neg_step_t, float beta1, float beta2, float epsilon, {decay}, "
    "Tensor(d!)[]? exp_avg_scales=None, Tensor(e!)[]? exp_avg_sq_scales=None) -> ()"
)
DECAY = {False: "Tensor weight_decay, bool has_weight_decay", True: "float weight_decay"}
calls = 0

_library = torch.library.Library("hpu", "DEF")


def register(lazy):
    _library.define(SHARED.format(decay=DECAY[lazy]))
    _library.impl("optimizer_adamw", _lazy if lazy else _eager, "CompositeExplicitAutograd")


def _eager(gradients, weights, avgs, squares, neg_step, beta1, beta2, eps, decay, has_decay, *scales):
    assert decay.shape == (1,), decay.shape
    _step(gradients, weights, avgs, squares, neg_step, beta1, beta2, eps, decay if has_decay else None)


def _lazy(gradients, weights, avgs, squares, neg_step, beta1, beta2, eps, decay, *scales):
    # the graph's results are bound to the tensors handed in; a view's base does not hear of them
    avgs, squares = ([t.clone() if t._base is not None else t for t in row] for row in (avgs, squares))
    _step(gradients, weights, avgs, squares, neg_step, beta1, beta2, eps, decay if decay != 1.0 else None)


def _step(gradients, weights, avgs, squares, neg_step, beta1, beta2, eps, decay):
    global calls
    calls += 1
    if not weights:
        raise RuntimeError("optimizer_adamw : can not process empty weight vector")
    if len({len(gradients), len(weights), len(avgs), len(squares)}) != 1:
        raise RuntimeError("All 4 vector inputs must have the same number of elements")
    assert neg_step.shape == (1,), neg_step.shape
    for g, w, m, v in zip(gradients, weights, avgs, squares, strict=True):
        assert g.dtype == w.dtype == m.dtype == v.dtype == neg_step.dtype == torch.float32
        m.mul_(beta1).add_(g * (1 - beta1))
        v.mul_(beta2).add_(g * g * (1 - beta2))
        if decay is not None:
            w.mul_(decay)
        w.add_(m / (v.sqrt() + eps) * neg_step)
