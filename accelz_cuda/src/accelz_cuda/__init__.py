"""The CUDA backend of accelz."""
