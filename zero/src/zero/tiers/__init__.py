"""Where state lives between its uses: on the device, in host memory, on disk.

Modules, lowest first:

apart                   the engine's own work, unseen by what the program has switched on
values, swap_file       values in any tier; a rank's unnamed file on disk
coded                   moments in 8 bits, as the values that they stand for
split_master            fp32 masters kept as what bf16 weights lack
tier                    device, host and disk as objects: what differs between them; an optimizer's state of a
                        sub-group, the master and its moments, in their tier
placement               which tier each group's state goes to, by the settings
pipeline                records from the disk, stepped and written back
read_ahead              parameters on disk, read before their gather asks for them
carrier                 copies between device and host beside the computation
stores                  one for each engine: what its tiers share
weight_writer           where stepped weights go
room                    out-of-memory errors that name the unit that found no room
device_bytes            bytes of the device that the engine holds, by kind; who follows them over a step
"""
