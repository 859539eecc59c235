"""The CPU backend of accelz."""
