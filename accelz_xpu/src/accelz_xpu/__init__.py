"""The backend of accelz for Intel GPUs: torch.xpu and xccl."""
