"""A simulated accelerator: the backend of accelz that a vendor reads first."""

NAME = "sim"
"""The name of the backend, of the device and of its module, torch.sim."""
