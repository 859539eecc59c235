"""Communication between ranks: collectives by unit, counted, compared, and explained when they fail.

Modules, lowest first:

lookout                 a thread that looks at what may go wrong
reports, waits          what ranks exchange when a collective has failed; long waits, logged
launch                  whether the processes that hold a job together are there
failures                explains collectives that failed or differ
line                    what all engines on the same groups issue, in one order
grid                    how a job's ranks are arranged in a mesh; arithmetic
job                     the process groups
mesh                    the ranks that parameters are spread over
ledger                  what an engine has issued: counted, hashed
differences             says in what ranks differ
disk_errors             errors of one rank's disk, until all can raise them
communicator            issues every collective
quantised               a buffer that travels in 8 bits
"""
