"""How fast a backend is: its kernels and copies, and its collectives, against a copy on the device."""
