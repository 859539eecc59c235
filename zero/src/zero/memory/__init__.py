"""What lives where, by measurement: the memory tracer, the margin rule, and state moved to make room.

Modules, lowest first:

memory_report           device memory over a step, for people
memory_tracer           follows it, with torch's own record of allocations
forecast                the peak with other state on the device, and what an update takes beside it
oom_retry               an operation that found no room, repeated
placement_policy        state stays where it is
balance                 state is moved by measurement: `offload="auto"`
"""
