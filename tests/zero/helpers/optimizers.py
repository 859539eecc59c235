"""Optimizers that several tests train with."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

import zero


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def plain_sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)


def lion(model: nn.Module) -> Optimizer:
    return zero.Lion(model.parameters(), lr=1e-3, weight_decay=0.1)


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def adagrad(model: nn.Module) -> Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=1e-2)
