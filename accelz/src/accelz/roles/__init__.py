"""What a backend provides, role by role, with what serves where it has nothing of its own.

Modules, lowest first:

host                     the host's device
memory, streams, rng     counters and host memory; queues of work, also for devices without; random numbers
kernels                  operations on flat tensors, each with a torch reference
direct_exchange          collectives of host memory in one exchange, instead of gloo's ring
collectives              process groups, and collectives on flat buffers
flat_buffer              flat buffers, and how parameters become views of one
"""
