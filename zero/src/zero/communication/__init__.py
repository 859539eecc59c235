"""What ranks say to each other: collectives by unit, counted, compared and explained when they fail.

Rooms, lowest first: `job` (the process groups), `reports` (what ranks exchange when a collective has failed),
`communicator` (every collective passes there), `quantised` (a buffer on its way in 8 bits).
"""
