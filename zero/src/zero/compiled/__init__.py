"""Training through torch.compile: ZeRO-3 as passes over graphs."""
