"""A simulated accelerator: the backend of accelz that a vendor reads first."""

NAME = "sim"
"""Of the backend, of the device and of its module, torch.sim."""
