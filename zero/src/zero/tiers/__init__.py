"""Where state lives between its uses: on the device, in host memory, on disk.

Rooms, lowest first:

placement               which tier each group's state goes to, by the settings
stored, swap_file       values that have to be read to be used; a rank's file on disk, without a name
values, joined, split   values in any tier; several as one; fp32 masters as what bf16 weights lack
record                  what an optimizer keeps of a sub-group, the master and its moments, in their tier
pipeline                records from the disk, stepped and written back
read_ahead              parameters on disk, read before their gather asks for them
carrier, outlet         copies between device and host beside the computation; where stepped weights go
stores                  one for each engine: makes and finds all of these
room                    running out of device memory, told with the unit that found no room
held                    what the engine holds of the device, by kind
"""
