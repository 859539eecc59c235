"""The host's device, which every backend's tensors can be copied to."""

import torch

HOST = torch.device("cpu")
