"""The ranks of a job: where they run, how they meet, and what they say to each other through the job's store.

Modules, lowest first:

machine, launcher, local_ranks   which machine a process is on, and which process warns of what concerns the
                                 machine; torchrun's process; which of a machine's ranks have ended
bounded_store                    the only way to the job's store, on which every call has a limit
attempts                         ranks meet each other, and not those that torchrun has ended
launch_environment               a process's place in its job, as the environment gives it
group, peers                     ranks that communicate; whether those on this machine have ended
exchange                         values that the ranks of a group say to each other
"""
