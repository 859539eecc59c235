"""How fast a backend is: its kernels, copies and collectives, compared with a copy on the device."""
