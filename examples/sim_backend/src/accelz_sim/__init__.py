"""A simulated accelerator: the backend of accelz that a vendor reads first."""
