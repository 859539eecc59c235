"""Communication between ranks: collectives by unit, counted, compared, and explained when they fail.

Modules, lowest first:

job                     the process groups
reports, watch          what ranks exchange when a collective has failed; long waits, logged
communicator            issues every collective
quantised               a buffer that travels in 8 bits
"""
