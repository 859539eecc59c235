"""Where state lives between its uses: on the device, in host memory, on disk."""
