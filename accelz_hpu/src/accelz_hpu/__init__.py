"""The backend of accelz for Intel Gaudi: habana_frameworks and HCCL."""
